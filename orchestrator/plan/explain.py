"""A plan as tables that a person reads at a glance.

Owns words and layout of the terminal output; every number comes from the `RunPlan`. What was not computed is
shown as such. `render` is the whole page; `cli/plan.py` prints it, and `--json` prints `plan.to_dict()` instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestrator.plan.conventions import conventions
from orchestrator.plan.explain_ranks import number_ranges, rank_table
from orchestrator.plan.loss_chunks import chunk_tokens
from orchestrator.plan.run_plan import RankMemory, RunPlan, Traffic

_MEMORY_ROWS = (
    ("parameters", "parameters, master weights included"),
    ("gathered", "gathered copies"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer state"),
    ("activations", "activations"),
    ("logits", "logits and loss"),
    ("buffers", "communication buffers"),
    ("reserve", "context and reserve"),
)
_TIME_ROWS = (
    ("compute", "computing"),
    ("tensor", "tensor-parallel traffic"),
    ("pipeline", "pipeline traffic"),
    ("bubble", "pipeline bubble"),
    ("context", "context-parallel traffic"),
    ("data", "data-parallel and ZeRO traffic"),
    ("optimizer", "optimizer"),
    ("offload", "offload over PCIe"),
)
_BAR_WIDTH = 16
_MEMORY_COLUMNS = 4
"""Pipeline ranks shown at most; the fullest is always among them."""


def render(plan: RunPlan, console: Console) -> None:
    """Print the whole page."""
    for part in _parts(plan):
        console.print(part)


def _parts(plan: RunPlan) -> Iterator[RenderableType]:
    yield _verdict(plan)
    yield Padding(_declared(plan), (0, 0, 1, 2))
    if plan.problems:
        yield from _section("Problems", _problems(plan))
    if plan.memory is not None:
        yield from _section(f"Memory of one {unit(plan)}", _memory(plan))
    if plan.memory is not None and plan.parallel is not None:
        yield from _section("Model states by convention (GB = 1e9 bytes)", _conventions(plan))
    if plan.parallel is not None:
        yield from _section("Time of one step", _time(plan))
        yield from _section(f"Traffic of one {unit(plan)} and step", _traffic(plan))
        yield from _section("Whole training", _whole_training(plan))
    if plan.ranks:
        yield from _section("Ranks", rank_table(plan))
    if plan.warnings:
        yield from _section("Notes", _notes(plan.warnings))


def _section(title: str, body: RenderableType) -> Iterator[RenderableType]:
    yield Text(title, style="bold")
    yield Padding(body, (0, 0, 1, 2))


def unit(plan: RunPlan) -> str:
    """What one rank has to itself: a GPU, or on a CPU a process and its share of the memory."""
    return "GPU" if plan.config.cluster.device == "cuda" else "process"


def size(value: float | None) -> str:
    """Bytes with a binary unit and three or four digits; a dash for what was not computed."""
    if value is None:
        return "-"
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= factor:
            return f"{value / factor:,.2f} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float | None) -> str:
    """Seconds in the unit a person would use."""
    if seconds is None:
        return "-"
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.3g} us"


def count(value: float | None) -> str:
    """A large number with a decimal unit (6.74 billion)."""
    if value is None:
        return "-"
    for name, factor in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {name}"
    return f"{value:,.0f}"


def _conventions(plan: RunPlan) -> RenderableType:
    table = _grid(3)
    table.add_row("", f"one {unit(plan)}", "whole model")
    if plan.parallel is not None:
        for found in conventions(plan.config, plan.parallel):
            table.add_row(found.label, f"{found.gpu_bytes / 1e9:,.2f} GB", f"{found.model_bytes / 1e9:,.2f} GB")
    return table


def _verdict(plan: RunPlan) -> Text:
    name = plan.config.run.experiment
    if plan.problems:
        number = len(plan.problems)
        if plan.memory is not None:
            return Text.assemble((f"{name}: does not fit", "bold red"), " - nothing was started.")
        return Text.assemble(
            (f"{name}: refused", "bold red"), f" - {number} problem{'s' if number > 1 else ''}, nothing was started."
        )
    memory = plan.memory
    if memory is None or memory.peak_bytes is None:
        return Text.assemble((f"{name}: possible", "bold yellow"), " - whether it fits into memory is not computed.")
    free = memory.capacity_bytes - memory.peak_bytes
    return Text.assemble(
        (f"{name}: fits", "bold green"),
        f" - {size(memory.peak_bytes)} of {size(memory.capacity_bytes)} a {unit(plan)}, {size(free)} "
        f"({free / memory.capacity_bytes:.0%}) to spare.",
    )


def _declared(plan: RunPlan) -> RenderableType:
    config, table = plan.config, _grid(2)
    model, training, cluster = config.model, config.training, config.cluster
    if plan.model is not None:
        flops = f"{plan.model.flops_per_token / 1e9:,.2f} GFLOP a token"
        table.add_row("model", f"{model.family}, {count(plan.model.parameters)} parameters, {flops}")
    gpus = cluster.gpus_per_node if cluster.device == "cuda" else f"{cluster.gpus_per_node} processes of"
    hardware = f"{cluster.nodes} x {gpus} {cluster.gpu.name}"
    if cluster.node_groups:
        hardware = " + ".join(
            f"{group.nodes} x {group.gpus_per_node} {group.gpu.name}" for group in cluster.node_groups
        )
    table.add_row("hardware", hardware)
    parallel = plan.parallel
    if parallel is not None:
        degrees = [f"data {parallel.data}", f"tensor {parallel.tensor}", f"pipeline {parallel.pipeline}"]
        degrees += [f"context {parallel.context}"] if parallel.context > 1 else []
        ranks = "rank" if parallel.world_size == 1 else "ranks"
        table.add_row("split", f"{' x '.join(degrees)} = {parallel.world_size} {ranks}; {_sharding(plan)}")
        if parallel.pipeline > 1:
            table.add_row("stages", f"{parallel.schedule}, layers {cut_words(parallel.stage_layers)}")
        whole = training.global_batch_size
        table.add_row(
            "batch",
            f"{whole} sequences of {training.sequence_length} tokens = micro-batch {training.micro_batch_size} x "
            f"{parallel.micro_batches} x data {parallel.data}",
        )
    computing = f"{training.precision}, recompute {training.activation_checkpointing}"
    table.add_row("computing", computing + (", offload to the host" if config.parallel.offload == "all" else ""))
    return table


def cut_words(stage_layers: Sequence[tuple[int, int]]) -> str:
    """Layers of the stages, equal neighbours together: `7 + 14 x 8 + 7 = 126`."""
    counts = [end - start for start, end in stage_layers]
    runs = [(len(list(run)), layers) for layers, run in groupby(counts)]
    return " + ".join(str(n) if times == 1 else f"{times} x {n}" for times, n in runs) + f" = {sum(counts)}"


def _sharding(plan: RunPlan) -> str:
    parallel = plan.parallel
    if parallel is None or parallel.zero_stage == 0:
        return "full copies"
    copies = "" if parallel.replicate == 1 else f", {parallel.replicate} copies"
    return f"ZeRO-{parallel.zero_stage} over {parallel.zero_group}{copies}"


def _grid(columns: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    for _ in range(columns - 1):
        table.add_column()
    return table


def _problems(plan: RunPlan) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(justify="right", style="bold red")
    table.add_column()
    for number, problem in enumerate(plan.problems, start=1):
        text = Text.assemble((problem.key, "bold"), (": " if problem.key else ""), problem.message)
        table.add_row(f"{number}.", text)
        if problem.fix:
            table.add_row("", Text(problem.fix, style="green"))
    return table


def _notes(warnings: Sequence[str]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column()
    for warning in warnings:
        table.add_row("-", Text(warning))
    return table


def _shown_ranks(ranks: Sequence[RankMemory]) -> list[RankMemory]:
    """First, second, fullest and last pipeline rank; all when they are few."""
    if len(ranks) <= _MEMORY_COLUMNS:
        return list(ranks)
    fullest = max(ranks, key=lambda rank: (rank.total_bytes or rank.persistent_bytes, -rank.pipeline))
    chosen = {0: ranks[0], fullest.pipeline: fullest, len(ranks) - 1: ranks[-1]}
    for rank in ranks:
        if len(chosen) < _MEMORY_COLUMNS:
            chosen.setdefault(rank.pipeline, rank)
    return [chosen[index] for index in sorted(chosen)]


def _memory(plan: RunPlan) -> RenderableType:
    if plan.memory is None:
        return Text("not computed")
    ranks = _shown_ranks(plan.memory.pipeline_ranks)
    several = len(plan.memory.pipeline_ranks) > 1
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=several, header_style="dim")
    table.add_column("")
    for rank in ranks:
        table.add_column(f"pipeline {rank.pipeline}", justify="right", no_wrap=True)
    if not several:
        table.add_column("", no_wrap=True)
    for name, label in _MEMORY_ROWS:
        values = [getattr(rank, f"{name}_bytes") for rank in ranks]
        if all(value == 0 for value in values):
            continue
        row: list[RenderableType] = [label, *(size(value) for value in values)]
        if not several:
            row.append(_bar(values[0], plan.memory.capacity_bytes))
        table.add_row(*row)
    table.add_row("total", *(size(rank.total_bytes) for rank in ranks), style="bold")
    holds = "the GPU holds" if unit(plan) == "GPU" else "its share of the memory"
    table.add_row(holds, *(size(plan.memory.capacity_bytes) for _ in ranks), style="dim")
    if any(rank.host_bytes for rank in ranks):
        table.add_row("in host memory", *(size(rank.host_bytes) for rank in ranks))
    left_out = [rank for rank in plan.memory.pipeline_ranks if rank not in ranks]
    below = [_left_out(left_out)] if left_out else []
    return Group(table, *(Text(line, style="dim") for line in (*below, *_loss_in_chunks(plan))))


def _loss_in_chunks(plan: RunPlan) -> Iterator[str]:
    """How many tokens' logits exist at once, where that is not all of a micro-batch."""
    assert plan.parallel is not None
    training = plan.config.training
    tokens = training.micro_batch_size * training.sequence_length // plan.parallel.context
    chunk = chunk_tokens(plan.config, plan.parallel)
    if chunk < tokens:
        yield f"the loss takes the logits of {chunk:,} tokens at a time, of the {tokens:,} of a micro-batch"


def _left_out(ranks: Sequence[RankMemory]) -> str:
    """What is not shown of the pipeline ranks between, in one line."""
    totals = [rank.total_bytes for rank in ranks if rank.total_bytes is not None]
    span = f": {size(min(totals))} to {size(max(totals))} in total" if totals else ""
    return f"not shown: pipeline {number_ranges([rank.pipeline for rank in ranks])}{span} (`--json` has all)"


def _bar(value: float | None, whole: float | None) -> Text:
    if value is None or not whole:
        return Text("")
    share = value / whole
    filled = min(_BAR_WIDTH, round(share * _BAR_WIDTH))
    return Text(f"{'█' * filled}{'·' * (_BAR_WIDTH - filled)} {share:4.0%}")


def _time(plan: RunPlan) -> RenderableType:
    time = plan.time
    if time.step_seconds is None:
        return Text("not computed")
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, label in _TIME_ROWS:
        value = getattr(time, f"{name}_seconds")
        if value:
            table.add_row(label, duration(value), _bar(value, time.step_seconds))
    table.add_row("step", duration(time.step_seconds), "", style="bold")
    if time.overlapped_seconds:
        table.add_row("hidden behind computing", duration(time.overlapped_seconds), "", style="dim")
    rates = [f"{time.tokens_per_second:,.0f} tokens/s"] if time.tokens_per_second is not None else []
    if time.tokens_per_second_per_gpu is not None:
        rates.append(f"{time.tokens_per_second_per_gpu:,.0f} a {unit(plan)}")
    rates += [f"MFU {time.mfu:.1%}"] if time.mfu is not None else []
    rates += [f"bubble {time.bubble_fraction:.1%}"] if time.bubble_fraction else []
    return Group(table, Text(", ".join(rates)))


def _traffic(plan: RunPlan) -> RenderableType:
    rows: list[tuple[str, Traffic]] = [
        (name, getattr(plan.traffic, name)) for name in ("tensor", "pipeline", "context", "data", "offload")
    ]
    if all(traffic.bytes is None for _, traffic in rows):
        return Text("not computed")
    shown = [(name, traffic) for name, traffic in rows if traffic.bytes]
    if not shown:
        return Text(f"none: one {unit(plan)} computes everything")
    table = _grid(3)
    for name, traffic in shown:
        table.add_row(name, size(traffic.bytes), _calls(traffic.calls))
    return table


def _calls(calls: int | None) -> str:
    if calls is None:
        return ""
    return "in 1 call" if calls == 1 else f"in {calls:,} calls"


def _whole_training(plan: RunPlan) -> RenderableType:
    time, cost = plan.time, plan.cost
    if time.days is None:
        return Text("not computed")
    table = _grid(2)
    length = f"{time.days:,.1f} days" if time.days >= 2 else f"{time.days * 24:,.1f} hours"
    table.add_row("duration", length)
    if cost.gpu_hours is not None:
        table.add_row("GPU-hours", f"{cost.gpu_hours:,.0f}")
    if cost.total is not None:
        price = f"{cost.price_per_gpu_hour:,.2f} {cost.currency} a GPU-hour"
        table.add_row("cost", f"{cost.total:,.0f} {cost.currency} at {price}")
    else:
        table.add_row("cost", "not known: give cluster.gpu.price_per_hour=PRICE")
    return table
