"""How far the planner is from published measurements: `python -m tests.benchmarks.planner_accuracy DIR [--fit]`.

DIR holds tables in the form of `perf_*.csv`, `mem_tables.csv`, `param_counts.csv`, `pretrain_runs.csv`,
`allreduce.csv`; those that are missing are left out. Errors are |predicted / measured - 1|. The headline refits all
numbers without each configuration (a model on a GPU within a kind of table) and judges it by them; a row that cannot be
expressed counts as 100 %. `--fit` also prints the numbers fitted to all rows, which is how
`orchestrator/plan/constants.py` is made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from orchestrator.plan.constants import FITTED, Fitted
from tests.benchmarks import planner_memory, planner_runs, planner_speed
from tests.benchmarks.planner_fit import Array
from tests.benchmarks.planner_formulas import Check, parameter_checks, table_checks
from tests.benchmarks.planner_rows import gpu_of


@dataclass(frozen=True, slots=True)
class Entry:
    """One row's error under a label."""

    label: str
    row_id: str
    error: float


def summary(label: str, entries: Sequence[Entry]) -> str:
    """Count, median, 90th percentile and worst of the entries on one line."""
    if not entries:
        return f"  {label:<34} {0:>4} rows"
    sizes = np.array([abs(entry.error) for entry in entries])
    worst = entries[int(np.argmax(sizes))]
    return (
        f"  {label:<34} {len(entries):>4} rows   median {np.median(sizes):6.1%}   90th {np.percentile(sizes, 90):6.1%}"
        f"   worst {worst.error:+8.1%} ({worst.row_id})"
    )


def by_label(title: str, entries: Sequence[Entry]) -> list[str]:
    """The whole and each label."""
    labels = sorted({entry.label for entry in entries})
    lines = [summary(title, entries)]
    if len(labels) > 1:
        lines += [summary("  " + label, [entry for entry in entries if entry.label == label]) for label in labels]
    return lines


def speed_report(directory: Path, show_fit: bool, rounds: int) -> list[str]:
    """Throughput: the headline, and apart from it what it leaves out."""
    cases, unexpressed = planner_speed.speed_cases(directory)
    if not cases:
        return []
    headline = [case for case in cases if planner_speed.counts(case.row)]
    missing = [item for item in unexpressed if planner_speed.counts(item.row)]
    lines = ["Tokens per second, 16-bit A100 and H100 rows of high and medium quality"]
    total = len(headline) + len(missing)
    lines.append(f"  expressed {len(headline)} of {total} ({len(headline) / max(total, 1):.1%})")
    if len(headline) > 1:
        fit = planner_speed.fit_speed(headline)
        lost = [Entry(item.row["kind"], item.row["row_id"], 1.0) for item in missing]
        held = _speed_entries(headline, planner_speed.held_out_errors(headline, fit, rounds))
        lines += by_label("leave one configuration out", held + lost)
        logs = planner_speed.predictor(headline)(FITTED)
        lines += by_label("as shipped", _speed_entries(headline, planner_speed.relative_errors(logs, headline)) + lost)
        if show_fit:
            lines += _fitted_lines(fit.values)
    lines += ["", "Apart: tokens per second as shipped, none of these rows was fitted"]
    rest = [case for case in cases if not planner_speed.counts(case.row)]
    logs = planner_speed.predictor(rest)(FITTED) if rest else np.zeros(0)
    entries = [
        Entry(_apart(case), case.row["row_id"], float(error))
        for case, error in zip(rest, planner_speed.relative_errors(logs, rest) if rest else (), strict=True)
    ]
    lines += [summary(label, [e for e in entries if e.label == label]) for label in sorted({e.label for e in entries})]
    lines += [f"  not expressed: {item.row['row_id']}: {item.reason}" for item in unexpressed]
    for found in planner_runs.llama_405b(cases):
        error = found.predicted / found.published - 1.0
        lines += [
            "",
            f"Llama-3-405B: {found.predicted:.1f} tokens/s a GPU, published {found.published:.1f} ({error:+.1%})",
        ]
        lines.append(f"  assumed: {found.cut}")
    return lines


def _apart(case: planner_speed.SpeedCase) -> str:
    """Why a row is not in the headline."""
    if case.row["quality"] == "low":
        return f"low quality, {gpu_of(case.row).name}"
    kind = "8 bits" if case.row["precision"].startswith("fp8") else "16 bits"
    return f"{kind}, {gpu_of(case.row).name}"


def _speed_entries(cases: Sequence[planner_speed.SpeedCase], errors: Array) -> list[Entry]:
    return [
        Entry(case.row["kind"], case.row["row_id"], float(error)) for case, error in zip(cases, errors, strict=True)
    ]


def _fitted_lines(values: Fitted) -> list[str]:
    lines = [f"  the {len(fields(Fitted))} numbers fitted to all rows of the headline:"]
    return lines + [f"    {field.name}: float = {getattr(values, field.name):.3g}" for field in fields(Fitted)]


def memory_report(directory: Path) -> list[str]:
    """Memory: bytes, and what fits."""
    cases, unexpressed = planner_memory.memory_cases(directory)
    if not cases:
        return []
    measured = [case for case in cases if case.measured is not None]
    good = [case for case in measured if case.row["quality"] != "low"]
    poor = [case for case in measured if case.row["quality"] == "low"]
    lines = ["", "Memory of the fullest GPU, rows of high and medium quality"]
    held = zip(good, planner_memory.held_out_errors(good), strict=True)
    lines += by_label("leave one configuration out", [Entry(c.row["kind"], c.row["row_id"], e) for c, e in held])
    shipped = list(zip(good, planner_memory.shipped_errors(good), strict=True))
    lines += by_label("as shipped", [Entry(c.row["kind"], c.row["row_id"], e) for c, e in shipped])
    lines += by_label("by profile", [Entry(c.profile.name, c.row["row_id"], e) for c, e in shipped])
    apart = zip(poor, planner_memory.shipped_errors(poor), strict=True)
    lines.append(summary("apart: low quality", [Entry("low", c.row["row_id"], e) for c, e in apart]))
    failed = [case for case in cases if not case.ran]
    seen = [case for case in failed if case.predicted() > case.capacity]
    lines.append(f"  did not fit: {len(seen)} of {len(failed)} are said not to fit")
    for case in failed:
        verdict = "does not fit" if case in seen else "is said to fit"
        lines.append(
            f"    {case.row['row_id']} {verdict}: {case.predicted() / 2**30:.1f} of {case.capacity / 2**30:.1f} GiB"
            + (f"; {case.row['notes']}" if case not in seen else "")
        )
    ran = [case for case in cases if case.ran]
    refused = [case for case in ran if case.predicted() > case.capacity]
    lines.append(f"  ran: {len(refused)} of {len(ran)} ({len(refused) / max(len(ran), 1):.1%}) are refused")
    for case in refused:
        lines.append(f"    {case.row['row_id']}: {case.predicted() / 2**30:.1f} of {case.capacity / 2**30:.1f} GiB")
    printed = [case for case in refused if case.measured is not None]
    share = len(printed) / max(len([case for case in measured if case.ran]), 1)
    lines.append(f"  of those whose memory is printed: {len(printed)} ({share:.1%})")
    return lines + [f"  not expressed: {item.row['row_id']}: {item.reason}" for item in unexpressed]


def formula_report(directory: Path) -> list[str]:
    """Figures that are arithmetic in their sources."""
    lines: list[str] = []
    for title, (checks, unexpressed) in (
        ("Parameter counts", parameter_checks(directory)),
        ("Analytic tables", table_checks(directory)),
    ):
        if not checks and not unexpressed:
            continue
        lines += ["", f"{title}: {sum(check.matches for check in checks)} of {len(checks)} agree to their rounding"]
        if len({check.kind for check in checks}) > 1:
            lines += _by_kind(checks)
        lines += [
            f"    {check.row_id}: {check.predicted:.6g}, published {check.published:.6g} {check.unit}"
            for check in checks
            if not check.matches
        ]
        lines += [f"  not expressed: {row_id}: {reason}" for row_id, reason in unexpressed]
    return lines


def _by_kind(checks: Iterable[Check]) -> list[str]:
    entries = [Entry(check.kind, check.row_id, check.error) for check in checks]
    return [summary(kind, [e for e in entries if e.label == kind]) for kind in sorted({e.label for e in entries})]


def runs_report(directory: Path) -> list[str]:
    """Whole runs and collectives."""
    lines: list[str] = []
    runs, unexpressed = planner_runs.training_runs(directory)
    if runs or unexpressed:
        lines += ["", "Training runs: GPU-hours without restarts (published ones contain them)"]
        for run in runs:
            error = "" if run.error is None else f" ({run.error:+.0%})"
            hours = "-" if run.published_hours is None else f"{run.published_hours:,.0f}"
            lines.append(
                f"  {run.row['row_id']} {run.row['model']}: {run.predicted_hours:,.0f} GPU-hours, published {hours}; "
                f"{run.predicted_days:.1f} days, published {run.row['days'] or '-'}{error}; {run.assumed}"
            )
        lines += [f"  not expressed: {row_id}: {reason}" for row_id, reason in unexpressed]
        entries = [Entry("", run.row["row_id"], run.error) for run in runs if run.error is not None]
        lines.append(summary("all runs", entries))
    reduces = [Entry(row["hw"], row["row_id"], error) for row, error in planner_runs.all_reduce_errors(directory)]
    if reduces:
        lines += ["", "All-reduce bus bandwidth", *by_label("all", reduces)]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; 2 when the folder holds no table."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.planner_accuracy", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--fit", action="store_true", help="print the numbers fitted to all rows of the headline")
    parser.add_argument(
        "--rounds", type=int, default=2, help="Gauss-Newton steps of each refit without a configuration"
    )
    options = parser.parse_args(arguments)
    if not any(options.directory.glob("*.csv")):
        sys.stderr.write(f"{options.directory} holds no tables (*.csv)\n")
        return 2
    lines = speed_report(options.directory, options.fit, options.rounds)
    lines += memory_report(options.directory) + formula_report(options.directory) + runs_report(options.directory)
    sys.stdout.write("\n".join(lines).lstrip("\n") + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
