"""What `launch` is asked and what it answers, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.errors import Problem
from orchestrator.placement.topology import PlacedRank
from orchestrator.plan.run_plan import RunPlan

ENGINE = "orchestrator.engine.rank:run_rank"
"""What each rank runs: `module:function`, called with (RankTask, RankLink)."""
ENGINE_PRELOAD = (
    "torch",
    "torch._dynamo",  # building any optimizer imports it, about a second
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
)
"""What the engine imports late, when a step or a save first needs it."""


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """One run to bring up and hold until it ends."""

    plan: RunPlan
    run_directory: str
    """Absolute path; logs of the ranks go to `logs/` in it."""
    command_started: float
    """`time.time()` at which the user's command began."""
    engine: str = ENGINE
    """`module:function` that every rank runs."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for every rank, over the ones that the driver passes on (`NCCL_*`, `GLOO_*`, `TORCH_*`)."""
    preload: tuple[str, ...] = ENGINE_PRELOAD
    """Modules that warm processes import before they fork ranks, beside the engine's own."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One life of the ranks, from their start to their end."""

    number: int
    """1 for the first start, one more for every restart."""
    cause: str
    """Why it ended: `finished`, `stopped`, or the class of what failed (`policy.FailureKind`)."""
    detail: str
    """One line: what ended it."""
    first_step: int | None
    """First optimizer step that it completed; None: it completed none."""
    last_step: int | None
    seconds: float
    world_size: int
    recovery_seconds: float | None = None
    """From the failure before it until its own first step; None for the first attempt, or when it reached no step. A
    rank that hangs has failed when it gave its last sign of life."""
    recovery_parts: Mapping[str, float] = field(default_factory=dict)
    """Where these seconds went, in order (`timings.py` has the names)."""
    resumed_step: int | None = None
    """Step of the checkpoint that it went on from; 0: from the beginning; None: it did not get that far."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes that it ran on."""

    def to_dict(self) -> dict[str, Any]:
        """As `summary.json` keeps it."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {**values, "recovery_parts": dict(self.recovery_parts), "nodes": list(self.nodes)}


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """How the run ended."""

    status: Literal["finished", "stopped", "failed"]
    attempts: tuple[Attempt, ...]
    rank_results: dict[int, dict[str, Any]]
    """`result` of each rank's `done` event, of the last attempt."""
    problems: tuple[Problem, ...]
    """What went wrong, in the user's terms; empty when nothing did."""
    placement: tuple[PlacedRank, ...]
    """Where the ranks of the last attempt lay."""
    timings: tuple[tuple[str, float], ...] = ()
    """(name, seconds) from the command's start to the first optimizer step, in order; they add up to it."""
    traceback: str = ""
    """The first failing rank's traceback, for the log; empty when there is none."""
    plan: RunPlan | None = None
    """The plan of the last attempt; another than was asked for when nodes were lost for good."""

    @property
    def seconds_to_first_step(self) -> float | None:
        """From the command's start to the end of the first optimizer step; None when there was none."""
        return sum(seconds for _, seconds in self.timings) if self.timings else None
