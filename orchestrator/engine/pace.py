"""How long a rank's own work of a step takes, without waiting for other ranks: what tells a slow rank from the rest.

All ranks end a step together, so its time says nothing about who held it up. Counted are the parts without a
collective: reading samples, the forward pass where every rank has the whole model, the optimizer's update. At the end
of each part the rank also beats: of ranks that wait for each other, the one that hangs has beaten the longest ago.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from orchestrator.plan.run_plan import ParallelFacts


class OwnWork:
    """Adds up seconds of own work; on CUDA between events, which are read once they have passed."""

    def __init__(self, device: torch.device, parallel: ParallelFacts) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.forward_is_own = parallel.tensor == parallel.pipeline == parallel.context == 1 and parallel.zero_stage == 0
        """Whether a forward pass holds no collective."""
        self.update_is_own = parallel.zero_stage != 1
        """Whether the optimizer's update holds none."""
        self.beat: Callable[[], None] = self.rest
        """Called at the end of every part of a step."""

    def rest(self) -> None:
        """A beat outside of steps: none."""

    @contextmanager
    def counted(self, *, when: bool = True) -> Iterator[None]:
        """Count the block, unless `when` is false."""
        if not when:
            yield
        elif self._cuda:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]
            first.record()
            yield
            last.record()
            self._events.append((first, last))
        else:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started
        self.beat()

    def take(self) -> float:
        """Seconds counted since the last call; what the GPU has not finished yet is counted in the next."""
        seconds, self._seconds = self._seconds, 0.0
        waiting = []
        for first, last in self._events:
            if last.query():  # type: ignore[no-untyped-call]
                seconds += float(first.elapsed_time(last)) / 1000
            else:
                waiting.append((first, last))
        self._events = waiting
        return seconds
