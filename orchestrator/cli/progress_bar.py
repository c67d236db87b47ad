"""The progress bar for a terminal: the only file that needs rich while training. The words are in `progress.py`."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from orchestrator.cli.placement_table import placement_lines
from orchestrator.cli.progress import Pace, event_lines, span


class ProgressBar:
    """Step, bar, loss, tokens a second, remaining time; everything else as lines above it."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._steps = steps
        self._pace = Pace(steps)
        self._placement: tuple[str, ...] = ()
        self._console = console or Console()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("starting", total=steps, figures="")

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def observe(self, event: dict[str, Any]) -> None:
        """Show an event."""
        if event["kind"] == "step":
            self._pace.add(event)
            self._bar.update(
                self._task,
                completed=event["step"],
                description=f"step {event['step']}/{self._steps}",
                figures=self._figures(event),
            )
            return
        for line in event_lines(event, self._placement):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        if event["kind"] == "placement":
            self._placement = placement_lines(event["table"])
        if event["kind"] == "resumed" and event.get("step"):
            self._bar.update(self._task, completed=event["step"])

    def _figures(self, record: dict[str, Any]) -> str:
        parts = [f"loss {record['loss']:.4f}"]
        if self._pace.tokens_per_second is not None:
            parts.append(f"{self._pace.tokens_per_second:,.0f} tokens/s")
        remaining = self._pace.remaining_seconds(record["step"])
        if remaining is not None and record["step"] < self._steps:
            parts.append(f"{span(remaining)} left")
        return "  ".join(parts)
