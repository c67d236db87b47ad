"""What the checks run on and with: the device, sizes for it, and a folder. The only place that knows sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.gpu.alone import in_child, plan_of

TINY = (
    "model=llama_tiny",
    "model.hidden_size=64",
    "model.intermediate_size=192",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.vocab_size=256",
    "model.max_position_embeddings=64",
    "training.sequence_length=64",
    "training.global_batch_size=8",
    "training.micro_batch_size=4",
    "optimizer.lr=1e-2",
)
"""A model of two layers, on whatever device."""
CANDIDATES = (
    ("model=llama3_2_1b", 4096, 4),
    ("model=tinyllama_1_1b", 2048, 4),
    ("model=tinyllama_1_1b", 2048, 1),
    ("model=smollm2_135m", 2048, 4),
)
"""(model, sequence, micro-batch) for speed and memory: the first that the planner says fits."""


@dataclass(frozen=True)
class Setting:
    """Where and how large."""

    device: Literal["cuda", "cpu"]
    folder: Path
    cluster: tuple[str, ...]
    """Overrides that declare the device to the planner."""
    large: tuple[str, ...]
    """Overrides of the model, sequence and batch for speed and memory."""
    compile: tuple[bool, ...]
    """Which settings of `training.compile` are measured."""
    described: str
    """The device, in words."""

    def words(self, *overrides: str) -> list[str]:
        """A whole command line: this device, synthetic data, nothing saved unless asked for. A later word for the same
        key replaces an earlier one, which the command itself would refuse."""
        words = [
            *self.cluster,
            "parallel.data=1",
            "data=synthetic",
            "optimizer=adamw",
            "optimizer.schedule.warmup_steps=1",
            "training.validation_sequences=1",
            "checkpoint.every_steps=0",
            "tracking.uri=sqlite:////nowhere/mlflow.db",
            *overrides,
        ]
        return list({word.partition("=")[0]: word for word in words}.values())


def setting_of(device: Literal["cuda", "cpu"], folder: Path) -> Setting:
    """The setting of this machine's first GPU, or of its CPU with tiny sizes (a rehearsal: nothing is measured there).

    Raises RuntimeError where a GPU is asked for and torch sees none.
    """
    if device == "cpu":
        cluster = ("cluster=local", "cluster.gpus_per_node=1")
        return Setting("cpu", folder, cluster, TINY, (False,), "CPU, tiny sizes: a rehearsal that measures nothing")
    name, memory_bytes = in_child(_gpu)
    cluster = _declared(name, memory_bytes / 2**30)
    for model, sequence, batch in CANDIDATES:
        large = (
            model,
            f"training.sequence_length={sequence}",
            f"training.global_batch_size={batch}",
            f"training.micro_batch_size={batch}",
            "optimizer.lr=1e-4",
        )
        trial = Setting("cuda", folder, cluster, large, (False, True), f"{name}, {memory_bytes / 2**30:.1f} GiB")
        try:
            plan_of(trial.words(*large, "training.steps=2"))
        except AssertionError:
            continue
        return trial
    raise RuntimeError(f"{name} with {memory_bytes / 2**30:.1f} GiB holds none of {[name for name, *_ in CANDIDATES]}")


def _gpu() -> tuple[str, int]:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU here (a CPU build of torch, or no driver)")
    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.total_memory


def _declared(name: str, memory_gib: float) -> tuple[str, ...]:
    """The planner's entry of this GPU; an unknown one is declared with its memory and without peaks."""
    from orchestrator.launch.gpu_kinds import by_product, known_entries

    option = by_product(name, memory_gib, known_entries()).option
    if option is not None:
        return ("cluster=h200_1x1", f"gpu={option}", "cluster.name=this machine")
    return (
        "cluster=h200_1x1",
        f"cluster.name={name!r}",
        f"cluster.gpu.name={name!r}",
        f"cluster.gpu.memory_gib={memory_gib:.1f}",
        "cluster.gpu.peak_tflops={fp32:null,bf16:null,fp16:null}",
    )
