"""The ranks that save or load together: gather, and run a local action so that one rank's failure is known to all.

Works without a process group too (one process). Tensors never travel here, only small Python values over gloo (or NCCL
when a group of it is given). Used by `store.py`; training's own collectives live in `engine/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

GROUP_TIMEOUT_SECONDS = 1800
"""The slowest write of one rank that the others wait for."""


class CheckpointError(RuntimeError):
    """A save or a load failed. Raised on every rank with the same message, which names the ranks at fault."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """A process group, or this process alone."""

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @staticmethod
    def of(group: dist.ProcessGroup | None = None) -> Ranks:
        """The given group, the default one, or this process alone when torch.distributed is not set up."""
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks(None, 0, 1)
        return Ranks(group, dist.get_rank(group), dist.get_world_size(group))

    @staticmethod
    def own_group() -> Ranks:
        """A gloo group of its own over all ranks, so that a save in a thread never meets training's collectives.

        Collective when torch.distributed is set up."""
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks(None, 0, 1)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS))
        return Ranks.of(group)

    @property
    def alone(self) -> bool:
        """Whether there is nobody to talk to, so that DCP must not look for a process group."""
        return not (dist.is_available() and dist.is_initialized())

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        gathered: list[T | None] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered  # type: ignore[return-value]

    def together(self, what: str, action: Callable[[], T]) -> list[T]:
        """Run an action on every rank; every rank's result, or the same CheckpointError on all if it failed on one.

        Args:
            what: what is being done, for the message ("write the manifest").
            action: local work without collectives.
        """
        result: T | None = None
        failure = None
        try:
            result = action()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        outcomes = self.gather((failure, result))
        failures = {rank: message for rank, (message, _) in enumerate(outcomes) if message is not None}
        if failures:
            shown = "; ".join(f"rank {rank}: {message}" for rank, message in failures.items())
            raise CheckpointError(f"could not {what} ({shown})")
        return [result for _, result in outcomes]  # type: ignore[misc]

    def on_first(self, what: str, action: Callable[[], T]) -> T:
        """Run an action on rank 0 only; its result on every rank, or the same CheckpointError on all."""
        result: T | None = self.together(what, lambda: action() if self.rank == 0 else None)[0]
        return result  # type: ignore[return-value]


def error_words(error: BaseException) -> str:
    """An error in one clause: what the system said and of which file, or the class and text of any other."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    return f"{type(error).__name__}: {error}"
