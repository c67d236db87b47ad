"""The attempts of a command as they end: what `summary.json` and MLflow get to know of each. No ray, no clock."""

from __future__ import annotations

from orchestrator.launch.generation import Generation
from orchestrator.launch.request import Attempt


class History:
    """Attempts that have ended, in order."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []

    @property
    def next_number(self) -> int:
        """Number of the attempt that comes next."""
        return len(self.attempts) + 1

    @property
    def ended_in_failure(self) -> bool:
        """Whether the last attempt failed."""
        return bool(self.attempts) and self.attempts[-1].cause not in ("stopped", "finished")

    def close(self, generation: Generation | None, cause: str, detail: str, now: float) -> None:
        """Note the end of a generation, once; later words about it are consequences."""
        if generation is None or len(self.attempts) >= generation.number:
            return
        recovery = None
        if generation.failed_before and generation.first_step_time:
            recovery = generation.first_step_time - generation.failed_before
        self.attempts.append(
            Attempt(
                number=generation.number,
                cause=cause,
                detail=detail,
                first_step=generation.first_step,
                last_step=generation.last_step,
                seconds=now - generation.started,
                world_size=len(generation.placed),
                recovery_seconds=recovery,
                resumed_step=generation.resumed_step,
                nodes=tuple(dict.fromkeys(entry.node_name for entry in generation.placed)),
            )
        )
