"""The profiler window: a trace of the steps in `training.profile_steps`, on the ranks in `training.profile_ranks`.

Owns `profile/` in the run's folder: `rank-003.json.gz`, a trace for Perfetto or chrome://tracing, and beside it
`rank-003.txt`, the dearest operators. Outside of the window a step pays two comparisons. A trace that cannot be written
is a warning, never the end of a training. Which windows make sense: `plan/validate/profile_rules.py`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from orchestrator.plan.rank_task import RankLink, RankTask

FOLDER = "profile"
_TABLE_ROWS = 40


class StepProfiler:
    """Profiles a rank's steps in the window; does nothing where nothing was asked for. Not collective."""

    def __init__(self, task: RankTask, link: RankLink, device: torch.device) -> None:
        training = task.plan.config.training
        self._window = training.profile_steps
        self._mine = training.profile_ranks == "all" or task.rank in training.profile_ranks
        self._rank, self._link, self._device = task.rank, link, device
        self._folder = Path(task.run_directory) / FOLDER
        self._profiler: torch.profiler.profile | None = None
        self._running: torch.autograd.profiler.record_function | None = None
        self._first = 0

    def covers(self, step: int) -> bool:
        """Whether the step lies in the window, on whatever rank: its time tells nothing of the pace then."""
        return self._window is not None and self._window[0] <= step <= self._window[1]

    def begin(self, step: int) -> None:
        """Called before each step; a run that goes on from within the window profiles what is left of it."""
        if not self._mine or not self.covers(step):
            return
        if self._profiler is None:
            self._first = step
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profiler.start()
        self._running = torch.autograd.profiler.record_function(f"step {step}")
        self._running.__enter__()  # type: ignore[no-untyped-call]

    def end(self, step: int) -> None:
        """Called after each step; writes the trace after the window's last."""
        if self._running is not None:
            self._running.__exit__(None, None, None)
            self._running = None
        if self._profiler is not None and not self.covers(step + 1):
            self._write(step)

    def close(self, step: int) -> None:
        """Write what there is when a run ends inside of the window; `step` is the last that was done."""
        self._running = None
        if self._profiler is not None:
            self._write(step)

    def _write(self, last: int) -> None:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profiler.stop()
        if last < self._first:
            return  # stopped before the window's first step was done
        trace = self._folder / f"rank-{self._rank:03d}.json.gz"
        # torch compresses by the name's ending.
        partial = trace.with_name(f".rank-{self._rank:03d}.partial.json.gz")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(partial))
            partial.rename(trace)
            trace.with_name(f"rank-{self._rank:03d}.txt").write_text(self._table(profiler), encoding="utf-8")
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            message = f"rank {self._rank}: the trace of steps {self._first} to {last} could not be written: {error}"
            self._link.report({"kind": "warning", "message": message})
            return
        steps = {"first_step": self._first, "last_step": last}
        self._link.report({"kind": "profile", "rank": self._rank, "path": str(trace), **steps})

    def _table(self, profiler: torch.profiler.profile) -> str:
        order = "self_device_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        return str(profiler.key_averages().table(sort_by=order, row_limit=_TABLE_ROWS)) + "\n"
