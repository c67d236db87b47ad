"""Small configurations for the tests of `orchestrator/data`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from orchestrator.config.schema import (
    ClusterConfig,
    DataConfig,
    GpuConfig,
    ModelConfig,
    RunConfig,
    TrainingConfig,
)


def data_config(*, vocab_size: int = 257, training: dict[str, Any] | None = None, **data: Any) -> RunConfig:
    """A configuration with these `data.*` and `training.*` values; the rest is as small as can be."""
    return RunConfig(
        model=ModelConfig(
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            vocab_size=vocab_size,
            max_position_embeddings=64,
        ),
        cluster=ClusterConfig(device="cpu", gpus_per_node=1, gpu=GpuConfig(name="cpu", memory_gib=1)),
        training=TrainingConfig(**{"sequence_length": 8, "global_batch_size": 4, "steps": 1, **(training or {})}),
        data=DataConfig(**data),
    )


def write_files(folder: Path, files: dict[str, str | bytes]) -> None:
    """Write the files, by name relative to the folder, and date them an hour back: the cache trusts no fresh file."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        hour_ago = path.stat().st_mtime_ns - 3600 * 10**9
        os.utime(path, ns=(hour_ago, hour_ago))
