"""The one workload that every contestant of a benchmark runs, and how it is said to each of them.

Plain values; imports nothing heavy, since the rival's start-up time is measured with it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Workload:
    """A LLaMA on random tokens; the default is small enough for two CPU cores. The numbers mean what `conf/` says."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 688
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    sequence_length: int = 256
    global_batch_size: int = 16
    ranks: int = 2
    threads: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero_stage: int = 0
    sequence_parallel: int = 0
    """1: tensor ranks also split the sequence."""
    micro_batches: int = 1
    """Micro-batches that a data rank computes for one step."""
    steps: int = 30
    warm_steps: int = 8
    """Steps at the beginning that are left out of the tokens per second."""
    precision: str = "fp32"
    lr: float = 3e-4
    weight_decay: float = 0.1
    warmup_steps: int = 5
    gradient_clip: float = 1.0
    seed: int = 0

    @property
    def data(self) -> int:
        """Data-parallel ranks: those that the other axes leave."""
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def micro_batch_size(self) -> int:
        """Sequences that one rank computes at a time."""
        return self.global_batch_size // (self.data * self.micro_batches)

    def overrides(self, run_directory: str) -> list[str]:
        """What the user would type to run it with this project."""
        return [
            "model=llama_tiny",
            f"model.vocab_size={self.vocab_size}",
            f"model.hidden_size={self.hidden_size}",
            f"model.intermediate_size={self.intermediate_size}",
            f"model.num_hidden_layers={self.num_hidden_layers}",
            f"model.num_attention_heads={self.num_attention_heads}",
            f"model.num_key_value_heads={self.num_attention_heads}",
            f"model.max_position_embeddings={self.sequence_length}",
            f"cluster.gpus_per_node={self.ranks}",
            f"parallel.data={self.data}",
            f"parallel.tensor={self.tensor}",
            f"parallel.pipeline={self.pipeline}",
            f"parallel.zero_stage={self.zero_stage}",
            f"parallel.sequence_parallel={str(bool(self.sequence_parallel)).lower()}",
            f"training.sequence_length={self.sequence_length}",
            f"training.global_batch_size={self.global_batch_size}",
            f"training.micro_batch_size={self.micro_batch_size}",
            f"training.steps={self.steps}",
            f"training.precision={self.precision}",
            f"training.gradient_clip={self.gradient_clip}",
            f"training.seed={self.seed}",
            "training.validate_every_steps=0",
            "training.validation_sequences=1",
            "optimizer=adamw",
            f"optimizer.lr={self.lr}",
            f"optimizer.weight_decay={self.weight_decay}",
            f"optimizer.schedule.warmup_steps={self.warmup_steps}",
            "data=synthetic",
            "checkpoint.every_steps=0",
            "checkpoint.resume=never",
            f"run.directory={run_directory}",
            "run.name=benchmark",
            f"tracking.uri=sqlite:///{run_directory}/mlflow.db",
        ]

    def arguments(self) -> list[str]:
        """The same for a script that reads it with `from_arguments`."""
        return [f"--{field.name}={getattr(self, field.name)}" for field in fields(self)]

    @staticmethod
    def from_arguments(parser: argparse.ArgumentParser) -> tuple[Workload, argparse.Namespace]:
        """Add the workload's options to a parser and read the command line."""
        for field in fields(Workload):
            default = field.default
            parser.add_argument(f"--{field.name}", type=type(default), default=default)
        arguments = parser.parse_args()
        values = {field.name: getattr(arguments, field.name) for field in fields(Workload)}
        return Workload(**values), arguments
