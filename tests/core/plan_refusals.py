"""What the planner refuses: one row a rule and kind, with the words and numbers that its message must have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.core import plan_cases as cases


@dataclass(frozen=True)
class Refusal:
    """A configuration that one rule refuses."""

    name: str
    key: str
    says: tuple[str, ...]
    fix: tuple[str, ...]
    model: dict[str, Any] = field(default_factory=dict)
    cluster: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


REFUSALS = (
    Refusal(
        "heads do not divide the hidden size",
        "model.num_attention_heads",
        ("5 heads", "model.hidden_size=64"),
        ("4 or 8 heads", "model.hidden_size=60 or 65", "model.head_dim"),
        model={"num_attention_heads": 5, "num_key_value_heads": None},
    ),
    Refusal(
        "key/value heads do not divide heads",
        "model.num_key_value_heads",
        ("3 key/value heads", "8 query heads"),
        ("2 or 4",),
        model={"num_key_value_heads": 3},
    ),
    Refusal("odd heads under rotary positions", "model.head_dim", ("pairs", "7"), ("even",), model={"head_dim": 7}),
    Refusal(
        "sequence longer than the positions",
        "training.sequence_length",
        ("256 tokens", "max_position_embeddings=128"),
        ("training.sequence_length=128",),
        training={"sequence_length": 256},
    ),
    Refusal(
        "bf16 on a V100",
        "training.precision",
        ("bf16_mixed", "V100-32GB"),
        ("fp16_mixed", "fp32"),
        cluster={"gpu": cases.V100_32GB},
    ),
    Refusal(
        "fp16 on a CPU",
        "training.precision",
        ("fp16_mixed", "CPU"),
        ("fp32", "bf16_mixed"),
        cluster={"device": "cpu", "gpu": {"name": "cpu", "memory_gib": 2}},
        training={"precision": "fp16_mixed"},
    ),
    Refusal(
        "compiled blocks under a split backward",
        "training.compile",
        ("zbv_zero_bubble",),
        ("training.compile=false", "1f1b"),
        parallel={"pipeline": 2, "virtual_stages": 2, "schedule": "zbv_zero_bubble"},
        training={"compile": True, "activation_checkpointing": "none"},
    ),
    Refusal(
        "recomputation under a split backward",
        "training.activation_checkpointing",
        ("zbv_zero_bubble", "saves no memory"),
        ("training.activation_checkpointing=none", "1f1b"),
        parallel={"pipeline": 2, "virtual_stages": 2, "schedule": "zbv_zero_bubble"},
        training={"activation_checkpointing": "selective"},
    ),
    Refusal(
        "momentum for adamw",
        "optimizer.momentum",
        ("momentum=0.9", "betas"),
        ("optimizer.name=sgd",),
        optimizer={"momentum": 0.9},
    ),
    Refusal(
        "tensor does not divide the feed-forward width",
        "parallel.tensor",
        ("4 does not divide model.intermediate_size=190",),
        ("parallel.tensor=1 or 2",),
        model={"intermediate_size": 190},
        parallel={"tensor": 4},
    ),
    Refusal(
        "tensor does not divide heads",
        "parallel.tensor",
        ("2 does not divide model.num_attention_heads=5",),
        ("parallel.tensor=1",),
        model={"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 60},
        parallel={"tensor": 2},
    ),
    Refusal(
        "more tensor ranks than key/value heads",
        "parallel.tensor",
        ("8 does not divide model.num_key_value_heads=4", "not replicated"),
        ("parallel.tensor=1, 2 or 4",),
        parallel={"tensor": 8},
    ),
    Refusal(
        "tensor group larger than a node",
        "parallel.tensor",
        ("8 does not fit into a node of 4 GPUs",),
        ("parallel.tensor=1, 2 or 4",),
        model={"num_key_value_heads": 8},
        cluster={"nodes": 2, "gpus_per_node": 4},
        parallel={"tensor": 8},
    ),
    Refusal(
        "sequence does not divide among context ranks",
        "parallel.context",
        ("training.sequence_length=100", "2 x parallel.context = 8"),
        ("96 or 104",),
        parallel={"context": 4},
        training={"sequence_length": 100},
    ),
    Refusal(
        "sequence does not divide among tensor ranks",
        "parallel.sequence_parallel",
        ("training.sequence_length=126", "1 x 4 = 4"),
        ("124 or 128", "sequence_parallel=false"),
        parallel={"tensor": 4, "sequence_parallel": True},
        training={"sequence_length": 126},
    ),
    Refusal(
        "more ranks than GPUs",
        "cluster.nodes",
        ("needs 16 GPUs (tensor 2 x pipeline 2 x data 4 = 16)", "1 node x 8 = 8 GPUs"),
        ("cluster.nodes=2 (2 x 8 = 16 GPUs)", "parallel.data=2"),
        parallel={"tensor": 2, "pipeline": 2, "data": 4},
    ),
    Refusal(
        "more processes than the one machine without GPUs has",
        "cluster.gpus_per_node",
        ("tensor 2 x pipeline 2 x data 1 = 4",),
        ("cluster.gpus_per_node=4",),
        parallel={"tensor": 2, "pipeline": 2},
        cluster={"device": "cpu", "gpus_per_node": 2, "gpu": {"name": "cpu", "memory_gib": 2}},
    ),
    Refusal(
        "more ranks than the large ones of unlike nodes have",
        "cluster.node_groups",
        ("needs 16 GPUs", "1 node x 8 + 2 nodes x 4 = 16 GPUs, 8 of them in whole tensor groups of 8"),
        ("more nodes of at least 8 GPUs", "parallel.data=1"),
        model={"num_key_value_heads": 8},
        cluster={
            "node_groups": [
                {"nodes": 1, "gpus_per_node": 8, "gpu": cases.A100_80GB},
                {"nodes": 2, "gpus_per_node": 4, "gpu": cases.A100_40GB},
            ]
        },
        parallel={"tensor": 8, "data": 2},
    ),
    Refusal(
        "the other degrees leave no whole data degree",
        "parallel.data",
        ("all 8 GPUs", "1 x 3 x 1 = 3"),
        ("parallel.data=2 to leave 2 GPUs idle",),
        parallel={"pipeline": 3},
    ),
    Refusal(
        "a sharding group without sharding",
        "parallel.zero_group",
        ("zero_group=4", "zero_stage=0"),
        ("parallel.zero_group=auto", "1, 2 or 3"),
        parallel={"zero_group": 4},
    ),
    Refusal(
        "a sharding group over an uneven rest",
        "parallel.zero_group",
        ("3 does not divide data x context = 8 x 1 = 8",),
        ("Use 2 or 4", "auto for 8"),
        parallel={"zero_stage": 2, "zero_group": 3},
    ),
    Refusal(
        "more stages than layers",
        "parallel.pipeline",
        ("pipeline 8 = 8 stages", "4 layers"),
        ("parallel.pipeline=4 or less",),
        model={"num_hidden_layers": 4},
        parallel={"pipeline": 8},
    ),
    Refusal(
        "more virtual stages than layers",
        "parallel.virtual_stages",
        ("pipeline 4 x virtual_stages 3 = 12 stages", "8 layers"),
        ("parallel.pipeline=2 or less", "parallel.virtual_stages=2 or less"),
        parallel={"pipeline": 4, "virtual_stages": 3, "schedule": "interleaved_1f1b"},
    ),
    Refusal(
        "more stages than a schedule is walked through with",
        "parallel.virtual_stages",
        ("pipeline 64 x virtual_stages 32 = 2048 stages", "1024"),
        ("parallel.virtual_stages=16 or less",),
        model={"num_hidden_layers": 4096},
        cluster={"nodes": 8},
        parallel={"pipeline": 64, "virtual_stages": 32, "schedule": "interleaved_1f1b"},
    ),
    Refusal(
        "a list of layers that drops two",
        "parallel.stage_layers",
        ("[3, 3] adds up to 6 layers", "the model has 8"),
        ("Add 2",),
        parallel={"pipeline": 2, "stage_layers": [3, 3]},
    ),
    Refusal(
        "a list of layers of the wrong length",
        "parallel.stage_layers",
        ("3 entries", "2 stages"),
        ("Give 2 numbers",),
        parallel={"pipeline": 2, "stage_layers": [3, 3, 2]},
    ),
    Refusal(
        "a stage without layers",
        "parallel.stage_layers",
        ("[8, 0] has a stage without a layer",),
        ("at least 1",),
        parallel={"pipeline": 2, "stage_layers": [8, 0]},
    ),
    Refusal(
        "virtual stages without a pipeline",
        "parallel.virtual_stages",
        ("2 stages a rank", "parallel.pipeline=1"),
        ("parallel.virtual_stages=1",),
        parallel={"virtual_stages": 2, "schedule": "interleaved_1f1b"},
    ),
    Refusal(
        "virtual stages under 1f1b",
        "parallel.virtual_stages",
        ("parallel.schedule=1f1b", "2 are asked"),
        ("interleaved_1f1b",),
        parallel={"pipeline": 2, "virtual_stages": 2},
    ),
    Refusal(
        "a V with three arms",
        "parallel.virtual_stages",
        ("dualpipev", "exactly 2 stages"),
        ("parallel.virtual_stages=2",),
        parallel={"pipeline": 2, "virtual_stages": 3, "schedule": "dualpipev"},
        training={"activation_checkpointing": "none"},
    ),
    Refusal(
        "interleaving of one stage",
        "parallel.virtual_stages",
        ("plain 1f1b",),
        ("parallel.virtual_stages=2",),
        parallel={"pipeline": 2, "schedule": "interleaved_1f1b"},
    ),
    Refusal(
        "too few micro-batches for 1f1b",
        "training.global_batch_size",
        ("at least parallel.pipeline = 4", "global_batch_size 4 / (micro_batch_size 1 x data 2) = 2"),
        ("training.global_batch_size=8 or 16", "gpipe"),
        parallel={"pipeline": 4},
        training={"global_batch_size": 4},
    ),
    Refusal(
        "too few micro-batches for dualpipev",
        "training.global_batch_size",
        ("at least 2 x parallel.pipeline = 8", "= 4"),
        ("training.global_batch_size=16 or 32",),
        parallel={"pipeline": 4, "virtual_stages": 2, "schedule": "dualpipev"},
        training={"global_batch_size": 8, "activation_checkpointing": "none"},
    ),
    Refusal(
        "micro-batches that do not fill the rounds",
        "training.global_batch_size",
        ("a whole number in each of 2 rounds", "= 9"),
        ("training.global_batch_size=16 or 24 (8 or 12 micro-batches)",),
        parallel={"pipeline": 4, "virtual_stages": 2, "schedule": "interleaved_1f1b"},
        training={"global_batch_size": 18},
    ),
    Refusal(
        "a batch that does not divide",
        "training.global_batch_size",
        ("63 sequences", "micro_batch_size 1 x data 8 = 8"),
        ("training.global_batch_size=56 or 64", "parallel.data=7"),
        training={"global_batch_size": 63},
    ),
    Refusal(
        "a micro-batch that does not divide",
        "training.global_batch_size",
        ("micro_batch_size 3 x data 8 = 24",),
        ("training.global_batch_size=48 or 72", "training.micro_batch_size=2 or 4"),
        training={"micro_batch_size": 3},
    ),
    Refusal("no length", "training.steps", ("Neither",), ("Set one",), training={"steps": None}),
    Refusal(
        "two lengths",
        "training.steps",
        ("steps=100 (819,200 tokens)", "tokens=5"),
        ("null",),
        training={"tokens": 5},
    ),
    Refusal(
        "a model that does not fit",
        "cluster.gpu.memory_gib",
        ("GiB", "optimizer", "A100-80GB holds 79.2 GiB"),
        ("parallel.zero_stage=1", "search"),
        model=cases.LLAMA_7B,
    ),
    Refusal(
        "an absurd width",
        "model.hidden_size",
        ("1000000000000000000000000000000", "1,000,000"),
        ("slip",),
        model={"hidden_size": 10**30},
    ),
    Refusal(
        "an absurd number of layers",
        "model.num_hidden_layers",
        ("1000000000", "10,000"),
        ("slip",),
        model={"num_hidden_layers": 10**9},
    ),
    Refusal(
        "a peak in FLOP/s instead of TFLOP/s",
        "cluster.gpu.peak_tflops.bf16",
        ("3.12e+14", "0.0001 to 1e+06"),
        ("unit",),
        cluster={"gpu": {**cases.A100_80GB, "peak_tflops": {"bf16": 312e12}}},
    ),
    Refusal(
        "a memory in bytes instead of GiB",
        "cluster.gpu.memory_gib",
        ("8.5e+10",),
        ("unit",),
        cluster={"gpu": {**cases.A100_80GB, "memory_gib": 85e9}},
    ),
    Refusal("an absurd cluster", "cluster.nodes", ("262,144",), ("slip",), cluster={"nodes": 10**15}),
    Refusal(
        "an absurd world",
        "parallel.data",
        ("ranks",),
        ("slip",),
        cluster={"nodes": 10**5, "gpus_per_node": 1024},
        training={"global_batch_size": 10**9},
    ),
)
