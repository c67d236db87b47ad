"""`RunPlan`: what was decided, as frozen values that round-trip through JSON. `make_plan` in `plan/make.py` builds it.

Units are in the names: `_bytes`, `_seconds`; plain counts otherwise. What cannot be computed is `None`, and `warnings`
says why. Memory categories are values at the instant of the peak and add up to `total_bytes`; times are exposed times
and add up to `step_seconds`; traffic is the input payload of one rank and step, summed over calls, not ring bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.errors import Problem

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What follows from the model's sizes alone."""

    parameters: int
    """Parameters, tied ones once."""
    flops_per_token: float
    """6 x matrix-product parameters + 12 x layers x hidden x sequence; no recompute, causal mask not halved."""


@dataclass(frozen=True, slots=True)
class ParallelFacts:
    """The degrees as decided."""

    data: int
    tensor: int
    pipeline: int
    context: int
    zero_stage: int
    zero_group: int
    """Ranks that share one sharded copy."""
    replicate: int
    """Sharded copies: data x context / zero_group."""
    world_size: int
    schedule: str
    virtual_stages: int
    micro_batches: int
    """Micro-batches of one optimizer step and data rank."""
    stage_layers: tuple[tuple[int, int], ...]
    """[first, last+1] layer of every virtual stage, in model order."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one GPU of a pipeline rank."""

    pipeline: int
    stages: tuple[int, ...]
    """Virtual stages that it holds."""
    persistent_bytes: int
    """Parameters + gradients + optimizer kept between steps."""
    parameters_bytes: int
    """FP32 master weights included."""
    gathered_bytes: int | None
    gradients_bytes: int
    """Gradients, whole or cut, that no reduction is working on. A reduction gives them back as it copies them into what
    it sends, so that at such a peak they are in `buffers_bytes`, up to three times over; where all weights are one unit
    (stage 0 on a CPU) none are left here then. What a step keeps of them is part of `persistent_bytes` always."""
    optimizer_bytes: int
    activations_bytes: int | None
    logits_bytes: int | None
    buffers_bytes: int | None
    reserve_bytes: int | None
    total_bytes: int | None
    host_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of the whole plan."""

    capacity_bytes: int
    """Usable memory of one GPU."""
    peak_bytes: int | None
    """Largest total over the pipeline ranks."""
    checkpoint_bytes: int | None
    """One checkpoint of the whole model, over all ranks."""
    pipeline_ranks: tuple[RankMemory, ...]


@dataclass(frozen=True, slots=True)
class TimePlan:
    """One optimizer step."""

    step_seconds: float | None = None
    compute_seconds: float | None = None
    tensor_seconds: float | None = None
    pipeline_seconds: float | None = None
    bubble_seconds: float | None = None
    context_seconds: float | None = None
    data_seconds: float | None = None
    optimizer_seconds: float | None = None
    offload_seconds: float | None = None
    overlapped_seconds: float | None = None
    """Communication hidden behind computation; not part of the sum."""
    tokens_per_second: float | None = None
    tokens_per_second_per_gpu: float | None = None
    mfu: float | None = None
    """Model FLOP/s over the peak of the precision (0 to 1)."""
    bubble_fraction: float | None = None
    days: float | None = None
    """Days for the whole training."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of communication of one rank and step."""

    bytes: int | None = None
    calls: int | None = None


@dataclass(frozen=True, slots=True)
class TrafficPlan:
    """Communication of one rank and step, by kind."""

    tensor: Traffic = Traffic()
    pipeline: Traffic = Traffic()
    context: Traffic = Traffic()
    data: Traffic = Traffic()
    offload: Traffic = Traffic()


@dataclass(frozen=True, slots=True)
class CostPlan:
    """What the whole training costs."""

    gpu_hours: float | None = None
    price_per_gpu_hour: float | None = None
    total: float | None = None
    currency: str | None = None


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank: where it computes and which part of the mesh it is."""

    rank: int
    node: int
    gpu: int
    data: int
    pipeline: int
    context: int
    tensor: int


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything that was decided about a run before anything starts."""

    config: RunConfig
    model: ModelFacts | None
    parallel: ParallelFacts | None
    memory: MemoryPlan | None
    time: TimePlan = TimePlan()
    traffic: TrafficPlan = TrafficPlan()
    cost: CostPlan = CostPlan()
    ranks: tuple[RankPlace, ...] = ()
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    profile: str = "ours"
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def feasible(self) -> bool:
        """Whether nothing speaks against the plan."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract of `plan --json` (bytes, seconds, plain numbers)."""

        def section(value: Any) -> Any:
            return None if value is None else asdict(value)

        return {
            "schema_version": self.schema_version,
            "feasible": self.feasible,
            "profile": self.profile,
            "config": self.config.to_dict(),
            "warnings": list(self.warnings),
            "problems": [problem.to_dict() for problem in self.problems],
            "model": section(self.model),
            "parallel": section(self.parallel),
            "memory": section(self.memory),
            "time": section(self.time),
            "traffic": section(self.traffic),
            "cost": section(self.cost),
            "ranks": [asdict(place) for place in self.ranks],
        }
