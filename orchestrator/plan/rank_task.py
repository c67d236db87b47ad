"""What one rank is told and how it talks back: the seam between `launch/` (Ray, processes) and `engine/` (torch).

Values and one protocol; neither side imports the other. `launch/` forks a process for each rank, builds its `RankTask`,
and calls `orchestrator.engine.rank:run_rank(task, link)` by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from orchestrator.plan.run_plan import RunPlan

Phase = Literal[
    "starting", "rendezvous", "building", "loading", "reading", "stepping", "validating", "saving", "finishing"
]
"""What a rank is doing, in the order in which a step goes through it; published with the step so that a hang can be
named."""


@dataclass(frozen=True, slots=True)
class RankTask:
    """Everything that a rank needs to know; picklable."""

    plan: RunPlan
    """The plan with its configuration (`plan.config`) and the table of ranks (`plan.ranks[rank]`)."""
    rank: int
    """Global rank; `plan.ranks[rank]` has its coordinates."""
    local_rank: int
    """Index of the rank among those of its node share; with CUDA also its visible device."""
    local_ranks: int
    """Ranks of its node share."""
    run_directory: str
    """Absolute path of the run's folder."""
    attempt: int
    """1 for the first start of the ranks, one more for every restart."""
    threads: int
    """Intra-op threads that the rank may use."""
    command_started: float
    """`time.time()` at which the user's command began."""
    environment: dict[str, str]
    """Variables set before torch is asked for anything (NCCL_*, GLOO_*)."""
    left_out: tuple[int, ...] = ()
    """Steps whose update is left out, because the run was rewound for them (`fault_tolerance.on_nan=rewind`)."""


class RankLink(Protocol):
    """The rank's line to its supervisor. Every call returns at once unless it says otherwise."""

    def beat(self, phase: Phase, step: int) -> None:
        """Say that the rank is alive, what it does and in which step."""

    def pace(self, own_seconds: float) -> None:
        """Say how long the rank's own work of a step took, without waiting for others, so that a slow one is named."""

    def report(self, event: dict[str, Any]) -> None:
        """Send an event to the driver. `kind` names it:

        `ready`  (every rank, once the mesh stands): rank, host, pid, device
        `resumed` (rank 0): step, checkpoint (path or None)
        `step`   (rank 0): the record of `metrics.jsonl`
        `validation` (rank 0): step, validation_loss
        `checkpoint` (rank 0): step, path
        `done`   (every rank): status ("finished" | "stopped"), step, result (dict of plain values, see engine/rank.py)
        `error`  (any rank): class (`launch/policy.py:FailureKind`), message, traceback, evidence (of the exception, if
                 it has that attribute; out of memory: `categories`, `planned`, `worst_category`, `snapshot`)
        """

    def stop_requested(self) -> bool:
        """Whether the rank was asked to save and stop at the next step boundary."""

    def rendezvous(self, port: int | None) -> tuple[str, int]:
        """Agree on where the ranks meet; blocks until it is known. Returns (host, port).

        Rank 0 passes the port that it listens on, the others None.
        """
