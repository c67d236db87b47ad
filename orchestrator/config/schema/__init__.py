"""The one typed schema. `config.compose` fills it, everything else reads it.

A section's fields, units and meanings are the docstrings under them; `--help` prints the same text. Rules between
fields live in `validate.py` and in `plan/`, which knows what a plan needs; nothing here computes or changes a value.
"""

from __future__ import annotations

from typing import Any

from orchestrator.config.schema.base import Section
from orchestrator.config.schema.cluster import ClusterConfig, GpuConfig, NodeGroup, PeakTflops
from orchestrator.config.schema.model import ModelConfig, RopeScaling
from orchestrator.config.schema.parallel import ParallelConfig, Schedule
from orchestrator.config.schema.run import (
    CheckpointConfig,
    DataConfig,
    FaultToleranceConfig,
    RunSection,
    TrackingConfig,
)
from orchestrator.config.schema.training import OptimizerConfig, Precision, ScheduleConfig, TrainingConfig


class RunConfig(Section):
    """Everything that a user declares."""

    run: RunSection = RunSection()
    """Name and place of the run."""
    model: ModelConfig
    """The transformer."""
    cluster: ClusterConfig
    """The hardware."""
    parallel: ParallelConfig = ParallelConfig()
    """How the training is split."""
    training: TrainingConfig
    """The training loop."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    data: DataConfig = DataConfig()
    """What is learned from."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is saved."""
    tracking: TrackingConfig = TrackingConfig()
    """The MLflow record."""
    fault_tolerance: FaultToleranceConfig = FaultToleranceConfig()
    """What is done when something fails."""

    def to_dict(self) -> dict[str, Any]:
        """The whole configuration as plain JSON values; `RunConfig.model_validate` reads it back."""
        return self.model_dump(mode="json")


__all__ = [
    "CheckpointConfig",
    "ClusterConfig",
    "DataConfig",
    "FaultToleranceConfig",
    "GpuConfig",
    "ModelConfig",
    "NodeGroup",
    "OptimizerConfig",
    "ParallelConfig",
    "PeakTflops",
    "Precision",
    "RopeScaling",
    "RunConfig",
    "RunSection",
    "Schedule",
    "ScheduleConfig",
    "Section",
    "TrackingConfig",
    "TrainingConfig",
]
