"""What a running training says: events of the launcher in, lines and a progress bar out.

On a terminal a bar with step, loss, tokens a second and remaining time, and a line for whatever is worth keeping;
elsewhere plain lines only, a step every few seconds. Words come from `event_lines`, which is pure.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from orchestrator.cli.placement_table import placement_lines

_SECONDS_BETWEEN_LINES = 5.0
"""Of step lines where there is no terminal."""
_PACE_STEPS = 50
"""Steps over which pace is averaged."""


class Progress(Protocol):
    """A context that takes events."""

    def observe(self, event: dict[str, Any]) -> None:
        """Show an event of the launcher."""

    def __enter__(self) -> Progress: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_progress(steps: int, stream: TextIO | None = None) -> Progress:
    """The bar for a terminal, plain lines for anything else."""
    stream = stream or sys.stdout
    if stream.isatty():
        from orchestrator.cli.progress_bar import ProgressBar

        return ProgressBar(steps)
    return PlainProgress(steps, stream)


class Pace:
    """Tokens a second and remaining time from the latest steps; the first step after a start is left out."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._recent: deque[tuple[float, float]] = deque(maxlen=_PACE_STEPS)
        self._attempt: int | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a step's record."""
        if record.get("attempt") != self._attempt:
            self._attempt = record.get("attempt")
            return
        self._recent.append((float(record["tokens"]), float(record["step_seconds"])))

    @property
    def tokens_per_second(self) -> float | None:
        """None before the second step."""
        seconds = sum(seconds for _, seconds in self._recent)
        return sum(tokens for tokens, _ in self._recent) / seconds if seconds > 0 else None

    def remaining_seconds(self, step: int) -> float | None:
        """Until the last step, validation and saving apart; None before the second step."""
        if not self._recent:
            return None
        return (self._steps - step) * sum(seconds for _, seconds in self._recent) / len(self._recent)


class PlainProgress:
    """Lines without control characters, for files and pipes."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        self._steps = steps
        self._stream = stream
        self._pace = Pace(steps)
        self._last_line: float | None = None
        self._placement: tuple[str, ...] = ()

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()

    def observe(self, event: dict[str, Any]) -> None:
        """Show an event."""
        if event["kind"] == "step":
            self._pace.add(event)
            if self._is_due(event):
                self._last_line = event["time"]
                self._say(step_line(event, self._steps, self._pace))
            return
        for line in event_lines(event, self._placement):
            self._say(line)
        if event["kind"] == "placement":
            self._placement = placement_lines(event["table"])

    def _is_due(self, record: Mapping[str, Any]) -> bool:
        if self._last_line is None or record["step"] == self._steps:
            return True
        return bool(record["time"] - self._last_line >= _SECONDS_BETWEEN_LINES)

    def _say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def step_line(record: Mapping[str, Any], steps: int, pace: Pace) -> str:
    """`step 120/200  loss 2.3456  8,543 tokens/s  12 s left`."""
    width = len(str(steps))
    parts = [f"step {record['step']:>{width}}/{steps}", f"loss {record['loss']:.4f}"]
    if pace.tokens_per_second is not None:
        parts.append(f"{pace.tokens_per_second:,.0f} tokens/s")
    remaining = pace.remaining_seconds(record["step"])
    if remaining is not None and record["step"] < steps:
        parts.append(f"{span(remaining)} left")
    if record.get("skipped"):
        parts.append("not finite: skipped")
    return "  ".join(parts)


def event_lines(event: Mapping[str, Any], placement: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The lines for an event that is no step; none for what only programs want. `placement` is what was last shown."""
    if event["kind"] == "placement":
        lines = placement_lines(event["table"])
        return () if lines == placement else lines
    line = _LINES.get(event["kind"], lambda _: None)(event)
    return () if line is None else (line,)


def span(seconds: float) -> str:
    """Seconds as a person says them: `12 s`, `3 min 20 s`, `5 h 12 min`, `3 d 4 h`."""
    whole = round(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s" if seconds >= 1 else f"{seconds:.1f} s"


def _resumed(event: Mapping[str, Any]) -> str | None:
    if not event.get("step"):
        return None
    return f"continued after step {event['step']} from {event['checkpoint']}"


def _validation(event: Mapping[str, Any]) -> str:
    return f"step {event['step']}: validation loss {event['validation_loss']:.4f} nats a token"


def _checkpoint(event: Mapping[str, Any]) -> str:
    if event.get("error"):
        after = "the run stops" if event.get("stops") else "training goes on"
        return f"step {event['step']}: the checkpoint could not be written: {event['error']}; {after}"
    return f"step {event['step']}: saved {Path(event['path']).name}"


def _profile(event: Mapping[str, Any]) -> str:
    return (
        f"profiled steps {event['first_step']} to {event['last_step']} on rank {event['rank']}: {event['path']} "
        "(for https://ui.perfetto.dev; the dearest operators are in the .txt beside it)"
    )


def _restart(event: Mapping[str, Any]) -> str:
    what = "the ranks start again in place" if event["what"] == "ranks" else "the run is placed again"
    return f"{event['message']}; {what} ({event['budget']})"


def _recovered(event: Mapping[str, Any]) -> str:
    return f"recovered: first step {span(event['seconds'])} after the failure"


def _stopping(event: Mapping[str, Any]) -> str:
    if event["grace_seconds"] is None:
        return f"{event['signal']}: ending what was started; no rank has anything to save"
    return f"{event['signal']}: saving and stopping, within {event['grace_seconds']:g} s; a second one ends it at once"


def _waiting(event: Mapping[str, Any]) -> str:
    return f"waiting for at most {event['limit_seconds']:g} s{event.get('then', '')}: {event['reason']}"


def _replanned(event: Mapping[str, Any]) -> str:
    idle = ", ".join(f"{count} on {node}" for node, count in event["idle"].items())
    text = f"planned anew for {event['world_size']} ranks, same global batch: {', '.join(event['changes'])}"
    text += f"; idle: {idle}" * bool(idle)
    return f"{text} ({event['reason'].rstrip('.')})" if event.get("reason") else text


def _preemption(event: Mapping[str, Any]) -> str:
    return f"{event['message']}: saving within {event['grace_seconds']:.0f} s and going on without it"


def _straggler(event: Mapping[str, Any]) -> str:
    return (
        f"rank {event['rank']} on {event['node']} is slow: {event['own_seconds']:.2f} s of its own work a step, the "
        f"middle rank {event['median_seconds']:.2f} s; the others wait for it"
    )


_LINES: dict[str, Any] = {
    "resumed": _resumed,
    "validation": _validation,
    "checkpoint": _checkpoint,
    "profile": _profile,
    "restart": _restart,
    "recovered": _recovered,
    "stopping": _stopping,
    "waiting": _waiting,
    "replanned": _replanned,
    "preemption": _preemption,
    "straggler": _straggler,
    "warning": lambda event: f"warning: {event['message']}",
}
"""Words for each kind of event; kinds that are not here are not shown."""
