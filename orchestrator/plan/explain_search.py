"""What a search found, as a table that a person reads and as JSON that a program reads.

Owns words and layout. The figures are `evaluate.py`'s, equal to those of `make_plan`; the ranking is `search.py`'s.
`--json` has every plan and every rejected split, the table the first of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestrator.config.schema import RunConfig
from orchestrator.plan.auto import can_train, largest_micro_batch
from orchestrator.plan.evaluate import Evaluator
from orchestrator.plan.explain import duration, size
from orchestrator.plan.inventory import take_inventory
from orchestrator.plan.make import make_plan
from orchestrator.plan.run_plan import RunPlan
from orchestrator.plan.search import Found, Ranked, Rejected
from orchestrator.plan.search_space import Candidate, Split, overrides

_SHOWN = 12
"""Plans in the table."""
_PLANNED_ONLY = "*"
_PLANNED_ONLY_WORDS = "can be planned, and is refused by `train`: the engine does not run context parallelism yet"
_REASONS = 6
"""Rejected splits in the table."""


def split_words(split: Split) -> str:
    """`tensor 8 x pipeline 4 x data 4, ZeRO-1`."""
    degrees = [("tensor", split.tensor), ("pipeline", split.pipeline), ("context", split.context)]
    named = [f"{name} {degree}" for name, degree in degrees if degree > 1]
    words = " x ".join([*named, f"data {split.data}"])
    return f"{words}, {zero_words(split)}" + (", offload" if split.offload else "")


def zero_words(split: Split) -> str:
    """`full copies`, `ZeRO-2`, or `ZeRO-2 of 8` for a group smaller than all ranks."""
    if split.zero_stage == 0:
        return "full copies"
    part = "" if split.zero_group == split.data * split.context else f" of {split.zero_group}"
    return f"ZeRO-{split.zero_stage}{part}"


def render_search(config: RunConfig, found: Found, console: Console) -> None:
    """Print the best plans, the declared one's place among them, and why other splits are none."""
    for part in _parts(config, found, console.width):
        console.print(part)


def _parts(config: RunConfig, found: Found, width: int) -> Iterator[RenderableType]:
    count = len(found.ranked)
    hardware = f"{take_inventory(config.cluster).describe()} ({config.cluster.gpu.name})"
    yield Text.assemble(
        (f"{config.run.experiment}: {count} {'plan fits' if count == 1 else 'plans fit'}", "bold"),
        f" on {hardware}; {len(found.rejected)} splits do not.",
    )
    if found.ranked:
        best = next((plan for plan in found.ranked if can_train(config, plan.candidate)), found.ranked[0])
        yield Padding(_table(config, found.ranked[:_SHOWN], best, width), (1, 0, 0, 2))
        if count > _SHOWN:
            yield Padding(Text(f"... and {count - _SHOWN} slower ones (--json has all)", style="dim"), (0, 0, 0, 2))
        if not all(can_train(config, plan.candidate) for plan in found.ranked[:_SHOWN]):
            yield Padding(Text(f"{_PLANNED_ONLY} {_PLANNED_ONLY_WORDS}", style="dim"), (0, 0, 0, 2))
        yield from _best(config, best, found.ranked.index(best) + 1)
        yield from _declared(config, best)
    if found.rejected:
        yield Padding(Text("Splits that do not fit, with their leanest course", style="bold"), (1, 0, 0, 0))
        yield Padding(_rejected(found.rejected), (0, 0, 0, 2))


def _table(config: RunConfig, ranked: tuple[Ranked, ...], best: Ranked, width: int) -> Table:
    wide = width >= 110
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("", "step", "MFU", "memory", "TP", "PP", "CP", "DP", "sharding", "micro"):
        table.add_column(title, justify="left" if title == "sharding" else "right", no_wrap=True)
    table.add_column("recompute" if wide else "rec.", no_wrap=True)
    if wide:
        table.add_column("schedule", no_wrap=True)
    evaluate = Evaluator(config)
    for number, plan in enumerate(ranked, start=1):
        split, course = plan.candidate.split, plan.candidate.course
        mfu = None if plan.step_seconds is None else evaluate.mfu(plan.candidate, plan.step_seconds)
        row = [
            str(number) if can_train(config, plan.candidate) else f"{_PLANNED_ONLY} {number}",
            duration(plan.step_seconds),
            "-" if mfu is None else f"{mfu:.0%}",
            size(evaluate.peak_where_it_fits(plan.candidate)),
            str(split.tensor),
            str(split.pipeline),
            str(split.context),
            str(split.data),
            zero_words(split) + (", offload" if split.offload else ""),
            str(course.micro_batch_size),
            course.recompute if wide else course.recompute.replace("selective", "sel."),
        ]
        if wide:
            row.append(schedule_words(plan.candidate))
        table.add_row(*row, style="bold" if plan is best else None)
    return table


def schedule_words(candidate: Candidate) -> str:
    """The schedule with its virtual stages; a dash without a pipeline."""
    course = candidate.course
    if candidate.split.pipeline == 1:
        return "-"
    return course.schedule + (f" x{course.virtual_stages}" if course.virtual_stages > 1 else "")


def _best(config: RunConfig, best: Ranked, number: int) -> Iterator[RenderableType]:
    which = "The best" if number == 1 else f"The best that trains, number {number}"
    yield Padding(Text(f"{which}, to be typed behind the same words", style="bold"), (1, 0, 0, 0))
    yield Padding(Text(" ".join(overrides(config, best.candidate)), style="green"), (0, 0, 0, 2))
    largest = largest_micro_batch(Evaluator(config), best.candidate)
    yield Padding(Text(f"Largest micro-batch that fits with it: {largest}"), (0, 0, 0, 2))


def _declared(config: RunConfig, best: Ranked) -> Iterator[RenderableType]:
    if config.parallel.strategy == "auto":
        return
    yield Padding(Text("The declared plan", style="bold"), (1, 0, 0, 0))
    yield Padding(Text(_against(make_plan(config), best)), (0, 0, 0, 2))


def _against(declared: RunPlan, best: Ranked) -> str:
    if not declared.feasible:
        return f"is refused: {declared.problems[0].message}"
    step = declared.time.step_seconds
    if step is None or best.step_seconds is None:
        return "fits; times are not computed for this hardware."
    slower = step / best.step_seconds - 1
    if slower < 0:
        return f"takes {duration(step)} a step, {-slower:.0%} less than the best that the search came upon."
    return f"takes {duration(step)} a step, {slower:.0%} more than that."


def _rejected(rejected: tuple[Rejected, ...]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column()
    for item in rejected[:_REASONS]:
        table.add_row(split_words(item.split), item.reason)
    if len(rejected) > _REASONS:
        table.add_row(Text(f"... and {len(rejected) - _REASONS} more (--json has all)", style="dim"))
    return table


def search_dict(config: RunConfig, found: Found) -> dict[str, Any]:
    """Everything that was found, as plain JSON values: seconds, bytes, and overrides to type."""
    evaluate = Evaluator(config)
    tokens = config.training.global_batch_size * config.training.sequence_length

    def row(plan: Ranked) -> dict[str, Any]:
        step = plan.step_seconds
        return {
            **_split_dict(plan.candidate.split),
            "schedule": plan.candidate.course.schedule,
            "virtual_stages": plan.candidate.course.virtual_stages,
            "micro_batch_size": plan.candidate.course.micro_batch_size,
            "activation_checkpointing": plan.candidate.course.recompute,
            "step_seconds": step,
            "tokens_per_second": None if step is None else tokens / step,
            "peak_bytes": evaluate.peak_where_it_fits(plan.candidate),
            "overrides": list(overrides(config, plan.candidate)),
            "trains": can_train(config, plan.candidate),
        }

    return {
        "schema_version": 1,
        "config": config.to_dict(),
        "capacity_bytes": evaluate.capacity_bytes,
        "plans": [row(plan) for plan in found.ranked],
        "rejected": [{**_split_dict(item.split), "reason": item.reason} for item in found.rejected],
    }


def _split_dict(split: Split) -> dict[str, Any]:
    return {
        "data": split.data,
        "tensor": split.tensor,
        "pipeline": split.pipeline,
        "context": split.context,
        "zero_stage": split.zero_stage,
        "zero_group": split.zero_group,
        "offload": "all" if split.offload else "none",
        "world_size": split.world_size,
    }
