"""The nearest match to what was typed: keys, group options, words, commands.

The last part of a dotted key weighs most, because that is what people remember; names that the field uses for our keys
(`tp`, `lr`, `mbs` ...) are known. Suggests at most three; never corrects by itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

ALIASES = {
    "tp": "parallel.tensor", "tensor_parallel": "parallel.tensor", "tensor_parallel_size": "parallel.tensor",
    "tensor_model_parallel_size": "parallel.tensor", "tp_size": "parallel.tensor",
    "pp": "parallel.pipeline", "pipeline_parallel": "parallel.pipeline", "pp_size": "parallel.pipeline",
    "pipeline_parallel_size": "parallel.pipeline", "pipeline_model_parallel_size": "parallel.pipeline",
    "dp": "parallel.data", "data_parallel": "parallel.data", "data_parallel_size": "parallel.data",
    "dp_size": "parallel.data",
    "cp": "parallel.context", "context_parallel": "parallel.context", "context_parallel_size": "parallel.context",
    "sp": "parallel.sequence_parallel", "zero": "parallel.zero_stage", "zero1": "parallel.zero_stage",
    "stage": "parallel.zero_stage", "zero_optimization": "parallel.zero_stage", "vpp": "parallel.virtual_stages",
    "cpu_offload": "parallel.offload", "hybrid_shard": "parallel.zero_group",
    "lr": "optimizer.lr", "learning_rate": "optimizer.lr", "wd": "optimizer.weight_decay",
    "warmup": "optimizer.schedule.warmup_steps", "lr_schedule": "optimizer.schedule.name",
    "min_lr": "optimizer.schedule.minimum_ratio", "adam_eps": "optimizer.eps", "epsilon": "optimizer.eps",
    "mbs": "training.micro_batch_size", "batch_size": "training.micro_batch_size",
    "per_device_train_batch_size": "training.micro_batch_size", "gbs": "training.global_batch_size",
    "train_batch_size": "training.global_batch_size", "gradient_accumulation_steps": "training.global_batch_size",
    "seq_len": "training.sequence_length", "seq_length": "training.sequence_length",
    "seqlen": "training.sequence_length",
    "max_steps": "training.steps", "num_steps": "training.steps", "train_steps": "training.steps",
    "max_tokens": "training.tokens", "train_tokens": "training.tokens", "dtype": "training.precision",
    "bf16": "training.precision", "fp16": "training.precision", "amp": "training.precision",
    "clip": "training.gradient_clip", "grad_clip": "training.gradient_clip", "max_grad_norm": "training.gradient_clip",
    "gradient_checkpointing": "training.activation_checkpointing", "recompute": "training.activation_checkpointing",
    "torch_compile": "training.compile", "eval_interval": "training.validate_every_steps",
    "layers": "model.num_hidden_layers", "n_layers": "model.num_hidden_layers", "n_layer": "model.num_hidden_layers",
    "num_layers": "model.num_hidden_layers", "heads": "model.num_attention_heads",
    "n_head": "model.num_attention_heads",
    "n_heads": "model.num_attention_heads", "kv_heads": "model.num_key_value_heads",
    "n_kv_heads": "model.num_key_value_heads", "hidden": "model.hidden_size", "n_embd": "model.hidden_size",
    "d_model": "model.hidden_size", "dim": "model.hidden_size", "ffn_hidden_size": "model.intermediate_size",
    "d_ff": "model.intermediate_size", "vocab": "model.vocab_size", "rope_base": "model.rope_theta",
    "n_positions": "model.max_position_embeddings", "gpus": "cluster.gpus_per_node",
    "num_gpus": "cluster.gpus_per_node",
    "num_nodes": "cluster.nodes", "nnodes": "cluster.nodes", "nproc_per_node": "cluster.gpus_per_node",
    "price": "cluster.gpu.price_per_hour", "memory": "cluster.gpu.memory_gib", "output_dir": "run.directory",
    "save_steps": "checkpoint.every_steps", "save_interval": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last", "resume_from": "checkpoint.resume",
    "resume_from_checkpoint": "checkpoint.resume", "tracking_uri": "tracking.uri", "mlflow_uri": "tracking.uri",
    "dataset": "data.source", "corpus": "data.source", "max_failures": "fault_tolerance.max_restarts",
}  # fmt: skip
"""What others call our keys."""


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Up to `count` of the known words that resemble `word`, best first; whole parts of a name count as resembling."""
    choices = list(known)
    folded = {choice.lower().replace("-", "_"): choice for choice in choices}
    wanted = word.lower().replace("-", "_")
    close = [choice for form, choice in folded.items() if len(wanted) >= 3 and form.startswith(wanted)]
    close += [folded[match] for match in difflib.get_close_matches(wanted, list(folded), n=count, cutoff=0.6)]
    if len(wanted) >= 3:
        close += [choice for form, choice in folded.items() if wanted in form or form in wanted]
    return list(dict.fromkeys(close))[:count]


def nearest_keys(key: str, known: Sequence[str], count: int = 3) -> list[str]:
    """Up to `count` full dotted keys that may have been meant by `key`, best first."""
    head, _, last = key.rpartition(".")
    last = last.lower()
    by_last: dict[str, list[str]] = {}
    for name in known:
        by_last.setdefault(name.rpartition(".")[2], []).append(name)
    found: list[str] = []
    alias = ALIASES.get(last)
    if alias is not None and alias in known:
        found.append(alias)
    for match in difflib.get_close_matches(last, list(by_last), n=count, cutoff=0.7):
        # Of several keys with the same last part the one whose section resembles what was typed comes first.
        found += sorted(by_last[match], key=lambda name: -_resemblance(head, name.rpartition(".")[0]))
    if not found:
        found = difflib.get_close_matches(key.lower(), known, n=count, cutoff=0.6)
    return list(dict.fromkeys(found))[:count]


def did_you_mean(found: Sequence[str]) -> str:
    """`Did you mean a, b or c?`, or nothing."""
    if not found:
        return ""
    quoted = [f"`{name}`" for name in found]
    return "Did you mean " + (", ".join(quoted[:-1]) + " or " if len(quoted) > 1 else "") + quoted[-1] + "?"


def _resemblance(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()
