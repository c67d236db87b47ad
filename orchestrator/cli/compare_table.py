"""A comparison of runs as tables on a terminal, and the words that the page uses as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestrator.plan.explain import size
from orchestrator.tracking.comparison import AXES, ComparedRun, Comparison, Training

_SHOWN_SETTINGS = 20
WORDS = 3
"""The first columns hold words, the others numbers."""
_INDENT, _GAP = 2, 2
FOLDED = {0: 16, 1: 14}
"""Columns that are folded where the terminal is narrow, and the width that they keep."""
COLUMNS = ("run", "plan", "state", "steps", "loss", "nats/byte", "tokens/s", "±", "MFU", "memory", "±", "cost")
"""Headings; ± is the difference between what was measured and what was planned of the column before."""


def render_comparison(found: Comparison, console: Console) -> None:
    """Print a table for each training, the verdicts, and the settings that differ."""
    for part in _parts(found, console.width):
        console.print(part)


def _parts(found: Comparison, width: int) -> Iterator[RenderableType]:
    names = names_of(found)
    for training in found.trainings:
        rows = [run for run in found.runs if run.training == training.number]
        yield Text(heading(training, len(found.trainings)), style="bold")
        for table in _runs(rows, names, width - _INDENT):
            yield Padding(table, (0, 0, 0, _INDENT))
        for sentence in verdicts(training, names, rows):
            yield Padding(Text(sentence), (0, 0, 0, _INDENT))
        yield Text("")
    if found.lowest_validation is not None and len(found.trainings) > 1:
        yield Text(f"lowest validation loss of all: {names[found.lowest_validation]}\n")
    if found.settings:
        yield Text("Settings that differ", style="bold")
        yield Padding(_settings(found, names), (0, 0, 0, _INDENT))
    if any(value is not None for run in found.runs for value in run.difference.values()):
        yield Text("±: measured against planned.", style="dim")


def names_of(found: Comparison) -> dict[str, str]:
    """Run id -> name; with the beginning of the id where two runs have the same name."""
    all_names = [run.name for run in found.runs]
    return {
        run.run_id: run.name if all_names.count(run.name) == 1 else f"{run.name} ({run.run_id[:6]})"
        for run in found.runs
    }


def heading(training: Training, trainings: int) -> str:
    """What the rows of a table have in common."""
    count = len(training.runs)
    if count == 1:
        return "One run" if trainings == 1 else f"Training {training.number}: one run"
    return f"{count} runs of the same training" if trainings == 1 else f"Training {training.number}: {count} runs"


def verdicts(training: Training, names: Mapping[str, str], rows: list[ComparedRun]) -> Iterator[str]:
    """Which run was best at what, and whether their losses agree."""
    if training.fastest is not None and training.advantage is not None:
        yield f"fastest: {names[training.fastest]}, {training.advantage:.2f} times as fast as the next"
    if training.cheapest is not None:
        yield f"cheapest a token: {names[training.cheapest]}"
    if training.leanest is not None:
        yield f"least memory: {names[training.leanest]}"
    if training.loss_spread is not None:
        ended = sum(run.status == "finished" for run in rows)
        yield f"final losses of the {ended} finished runs differ by at most {training.loss_spread:.1e} of the lowest"


def cells(run: ComparedRun, name: str) -> tuple[str, ...]:
    """A row under `COLUMNS`."""
    measured, difference = run.measured, run.difference
    restarts = f", {run.restarts} restarts" if run.restarts and run.restarts > 1 else ""
    restarts = ", 1 restart" if run.restarts == 1 else restarts
    return (
        name,
        plan_text(run),
        f"{run.status}{restarts}",
        "-" if run.steps is None else f"{run.steps:,}",
        _number(run.validation_loss if run.loss is None else run.loss, ".4f"),
        _number(run.validation_nats_per_byte, ".4f"),
        _number(measured["tokens_per_second"], ",.0f"),
        _number(difference["tokens_per_second"], "+.0%"),
        _number(measured["mfu"], ".1%"),
        size(measured["peak_bytes"]),
        _number(difference["peak_bytes"], "+.0%"),
        _number(run.cost_per_billion_tokens, ",.2f"),
    )


def plan_text(run: ComparedRun) -> str:
    """The plan in a few words: `data 4 · tensor 2 · ZeRO 3 of 2 · 1f1b`."""
    plan = run.plan
    if not plan:
        return "not recorded"
    words = [f"{axis} {plan[axis]}" for axis in AXES if (plan.get(axis) or 1) > 1]
    if stage := plan.get("zero_stage"):
        ranks = (plan.get("data") or 1) * (plan.get("context") or 1)
        words.append(
            f"ZeRO {stage}" + (f" of {plan['zero_group']}" if plan.get("zero_group") not in (None, ranks) else "")
        )
    if (plan.get("pipeline") or 1) > 1:
        words.append(str(plan.get("schedule")))
    return " · ".join(words or ["one process"]) + (", re-planned on the way" if run.replanned else "")


def started(run: ComparedRun) -> str:
    """When a run began, by the clock of this machine."""
    return datetime.fromtimestamp(run.started_ms / 1000).strftime("%Y-%m-%d %H:%M")


def setting_rows(found: Comparison) -> list[tuple[str, list[str]]]:
    """(key, a value a run in the order of the runs) of the settings that differ."""
    return [
        (key, ["-" if (value := values[run.run_id]) is None else value for run in found.runs])
        for key, values in found.settings.items()
    ]


def _runs(rows: list[ComparedRun], names: Mapping[str, str], width: int) -> Iterator[Table]:
    """One table, or as many with the same rows as a narrow terminal needs."""
    body = [cells(run, names[run.run_id]) for run in rows]
    columns = [0]
    for column in columns_with_values(body)[1:]:
        if sum(_least_width(each, body) + _GAP for each in (*columns, column)) > width and len(columns) > 1:
            yield _table(columns, body)
            columns = [0]
        columns.append(column)
    yield _table(columns, body)


def columns_with_values(body: list[tuple[str, ...]]) -> list[int]:
    """Places of the columns that say something about any run; the words always do."""
    return [place for place in range(len(COLUMNS)) if place < WORDS or any(row[place] != "-" for row in body)]


def _table(columns: list[int], body: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(
            COLUMNS[column],
            justify="left" if column < WORDS else "right",
            no_wrap=column not in FOLDED,
            overflow="fold",
            min_width=_least_width(column, body),
        )
    for number, row in enumerate(body):
        table.add_row(*(row[column] for column in columns), style="bold" if number == 0 and len(body) > 1 else None)
    return table


def _least_width(column: int, body: list[tuple[str, ...]]) -> int:
    longest = max(len(text) for text in (COLUMNS[column], *(row[column] for row in body)))
    return min(longest, FOLDED.get(column, longest))


def _settings(found: Comparison, names: Mapping[str, str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("setting", no_wrap=True)
    for run in found.runs:
        table.add_column(names[run.run_id], overflow="fold")
    rows = setting_rows(found)
    for key, values in rows[:_SHOWN_SETTINGS]:
        table.add_row(key, *values)
    if len(rows) > _SHOWN_SETTINGS:
        table.add_row(f"... {len(rows) - _SHOWN_SETTINGS} more (--json has all)")
    return table


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
