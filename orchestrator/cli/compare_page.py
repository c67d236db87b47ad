"""A comparison of runs as one HTML page without anything outside it: tables, loss curves, predicted beside measured."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from orchestrator.cli.compare_table import (
    COLUMNS,
    FOLDED,
    WORDS,
    cells,
    columns_with_values,
    heading,
    names_of,
    plan_text,
    setting_rows,
    started,
    verdicts,
)
from orchestrator.tracking.comparison import Comparison

Curve = Sequence[tuple[int, float]]
"""(step, training loss)."""
_TEMPLATE = Path(__file__).with_name("compare_page.html")
_POINTS = 1000
"""Of one curve on the page; more would be narrower than a pixel."""


def page(found: Comparison, curves: Mapping[str, Curve], store: str) -> str:
    """The page. `curves` by run id; `store` says where the record is."""
    names = names_of(found)
    tables = []
    for training in found.trainings:
        rows = [run for run in found.runs if run.training == training.number]
        tables.append(
            {
                "heading": heading(training, len(found.trainings)),
                "rows": [{"cells": cells(run, names[run.run_id]), "started": started(run)} for run in rows],
                "verdicts": list(verdicts(training, names, rows)),
            }
        )
    body = [cells(run, names[run.run_id]) for run in found.runs]
    labels = {run.run_id: f"{names[run.run_id]}: {plan_text(run)}" for run in found.runs}
    drawn = {labels[run.run_id]: curve for run in found.runs if (curve := curves.get(run.run_id))}
    template = Environment(autoescape=True).from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        total=len(found.runs),
        store=store,
        columns=[{"place": place, "name": COLUMNS[place], "kind": _kind(place)} for place in columns_with_values(body)],
        tables=tables,
        curves=Markup(_drawing(drawn)) if drawn else None,  # matplotlib escapes the labels
        settings=setting_rows(found),
        names=[names[run.run_id] for run in found.runs],
    )


def _kind(column: int) -> str:
    """Its class in the page."""
    return "word folds" if column in FOLDED else "word" if column < WORDS else "number"


def _drawing(curves: Mapping[str, Curve]) -> str:
    """All curves in one drawing, as an SVG element."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.add_subplot()
    # Runs of one training lie on one another: the later ones are drawn thinner and dashed, so that all can be seen.
    styles = itertools.cycle((("-", 3.0), ("--", 1.8), (":", 1.8), ("-.", 1.2)))
    for (label, curve), (style, width) in zip(curves.items(), styles):  # noqa: B905 - endless
        every = -(-len(curve) // _POINTS)
        thinned = [*curve[::every], curve[-1]]
        axes.plot(
            [step for step, _ in thinned],
            [loss for _, loss in thinned],
            label=_literal(label),
            linewidth=width,
            linestyle=style,
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def _literal(label: str) -> str:
    """A label without the meaning that matplotlib gives to some characters."""
    return label.replace("$", r"\$").lstrip("_")
