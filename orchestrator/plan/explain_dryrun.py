"""A dry run's report as tables that a person reads at a glance; every number comes from `dryrun_report.report`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestrator.plan.explain import size

_LABELS = {
    "parameters": "parameters, master weights included",
    "gathered": "gathered copies",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "logits": "logits and loss",
    "buffers": "communication buffers",
    "total": "tensors",
}


def render_dryrun(name: str, report: Mapping[str, Any], console: Console) -> None:
    """Print the whole page. `report` is that of `dryrun_report.report`."""
    for part in _parts(name, report):
        console.print(part)


def _parts(name: str, report: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield _verdict(name, report)
    ranks = [entry for entry in report["ranks"] if not entry["failed_while"]]
    if not ranks:
        return
    yield from _section("Peak of each unlike rank, tensors alone", _ranks(report["ranks"]))
    worst = next(entry for entry in ranks if entry["rank"] == report["worst"]["rank"])
    place = f"Memory of rank {worst['rank']}, the fullest (pipeline rank {worst['pipeline']})"
    yield from _section(place, _memory(worst, report))
    yield from _section(f"What rank {worst['rank']} sends and computes in a step", _work(worst))
    yield from _section("How the simulation differs from a real step", _differences(report, ranks))


def _section(title: str, body: RenderableType) -> Iterator[RenderableType]:
    yield Text(title, style="bold")
    yield Padding(body, (0, 0, 1, 2))


def _verdict(name: str, report: Mapping[str, Any]) -> Text:
    worst = report["worst"]
    if worst is None or any(entry["failed_while"] for entry in report["ranks"]):
        return Text.assemble((f"{name}: fails", "bold red"), " in the simulated step.")
    capacity, total = report["capacity_bytes"], worst["total_bytes"]
    fits = total <= capacity
    spare = f"{size(capacity - total)} to spare" if fits else f"{size(total - capacity)} too much"
    return Text.assemble(
        (f"{name}: {'fits' if fits else 'does not fit'}", "bold green" if fits else "bold red"),
        f" - simulated {size(worst['simulated_bytes'])} of tensors + {size(worst['reserve_bytes'])} context and reserve"
        f" = {size(total)} of {size(capacity)}, {spare}.",
    )


def percent(difference: float | None) -> str:
    """A relative difference with its sign; a dash where there is nothing to compare with."""
    return "-" if difference is None else f"{difference:+.1%}"


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _ranks(entries: list[Mapping[str, Any]]) -> RenderableType:
    table = _table("rank", "pipeline", "in groups", "like it", "simulated", "planned", "diff.", "FLOPs")
    for entry in entries:
        total = entry["memory"]["total"]
        row = [str(entry["rank"]), str(entry["pipeline"]), entry["place"], str(entry["stands_for"])]
        if entry["failed_while"]:
            table.add_row(*row, "failed", "", "", "")
            continue
        shown = (size(total["simulated_bytes"]), size(total["planned_bytes"]), percent(total["difference"]))
        table.add_row(*row, *shown, f"{entry['flops']['simulated']:.3g}")
    return table


def _memory(entry: Mapping[str, Any], report: Mapping[str, Any]) -> RenderableType:
    table = _table("", "simulated", "planned", "difference")
    for name, values in entry["memory"].items():
        shown = (size(values["simulated_bytes"]), size(values["planned_bytes"]), percent(values["difference"]))
        table.add_row(_LABELS[name], *shown, style="bold" if name == "total" else None)
    worst = report["worst"]
    table.add_row("context and reserve", size(worst["reserve_bytes"]), "", "")
    total = (size(worst["total_bytes"]), size(worst["planned_bytes"]), percent(worst["difference"]))
    table.add_row("with them", *total, style="bold")
    table.add_row("what it may hold", size(report["capacity_bytes"]), "", "", style="dim")
    if entry["host_bytes"]["simulated"]:
        table.add_row(
            "in host memory", size(entry["host_bytes"]["simulated"]), size(entry["host_bytes"]["planned"]), ""
        )
    return table


def _work(entry: Mapping[str, Any]) -> RenderableType:
    table = _table("group", "simulated", "planned", "difference", "calls", "planned")
    for axis, values in entry["traffic"].items():
        shown = (size(values["simulated_bytes"]), size(values["planned_bytes"]), percent(values["difference"]))
        table.add_row(axis, *shown, f"{values['simulated_calls']:,}", f"{values['planned_calls']:,}")
    detail = _table("group", "collective", "calls", "bytes handed in")
    for call in entry["collectives"]:
        detail.add_row(call["axis"], call["kind"], f"{call['calls']:,}", size(call["bytes"]))
    flops = entry["flops"]
    line = f"{flops['simulated']:.4g} FLOPs, planned {flops['planned']:.4g} ({percent(flops['difference'])})"
    return Group(table, detail, Text(line)) if entry["collectives"] else Text(line)


def _differences(report: Mapping[str, Any], ranks: list[Mapping[str, Any]]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for difference in report["differences"]:
        table.add_row("-", Text(difference))
    counts = max((entry["micro_batches"] for entry in ranks), key=len)
    if len(counts) == 2:
        said = f"Steps of {counts[0]} and {counts[1]} micro-batches were simulated; the whole step follows from them."
        table.add_row("-", Text(said))
    most = max(entry["resident_bytes"] for entry in ranks)
    number = len(report["ranks"])
    who = "1 rank" if number == 1 else f"{number} ranks"
    said = f"{who} in {report['seconds']:.0f} s, each in {size(most)} of real memory at most."
    return Group(table, Text(said, style="dim"))
