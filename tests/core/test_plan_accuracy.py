"""The accuracy report on an excerpt of published tables: the shipped numbers stay near; what it cannot state is named.

The excerpt holds a few rows of each kind, sources included; the report takes any folder of such tables.
"""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest

from orchestrator.plan.constants import FITTED
from tests.benchmarks import planner_accuracy, planner_fit, planner_memory, planner_runs, planner_speed
from tests.benchmarks.planner_formulas import parameter_checks, table_checks
from tests.benchmarks.planner_rows import Inexpressible, work_of_row

EXCERPT = Path(__file__).parent / "data" / "planner_tables"


def test_the_shipped_numbers_are_near_published_throughput() -> None:
    cases, unexpressed = planner_speed.speed_cases(EXCERPT)
    assert unexpressed == []
    headline = [case for case in cases if planner_speed.counts(case.row)]
    assert len(headline) >= 15
    errors = np.abs(planner_speed.relative_errors(planner_speed.predictor(headline)(FITTED), headline))
    assert np.median(errors) < 0.08
    assert errors.max() < 0.20


def test_llama_3_405b_is_within_a_tenth_of_the_published_figure_and_the_cut_is_stated() -> None:
    (found,) = planner_runs.llama_405b(planner_speed.speed_cases(EXCERPT)[0])
    assert found.predicted == pytest.approx(found.published, rel=0.10)
    assert "PP 16" in found.cut and "4 stages a rank, first 1, last 1, others 2 layers" in found.cut


def test_memory_is_near_and_what_did_not_fit_is_said_not_to() -> None:
    cases, unexpressed = planner_memory.memory_cases(EXCERPT)
    assert unexpressed == []
    assert np.median(np.abs(planner_memory.shipped_errors(cases))) < 0.07
    for case in cases:
        assert (case.predicted() <= case.capacity) == case.ran, case.row["row_id"]


def test_analytic_rows_agree_and_inexpressible_ones_say_why() -> None:
    parameters, unknown = parameter_checks(EXCERPT)
    assert [check.matches for check in parameters] == [True] * 3 and unknown == []
    checks, unexpressed = table_checks(EXCERPT)
    assert [check.row_id for check in checks if not check.matches] == []
    assert unexpressed == [("deepspeed_estimator-001", "offloading the optimizer alone is not planned")]


def test_the_command_prints_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner_accuracy.main([str(EXCERPT)]) == 0
    printed = capsys.readouterr().out
    for line in (
        "leave one configuration out",
        "as shipped",
        "Llama-3-405B",
        "did not fit: 2 of 2 are said not to fit",
        "Parameter counts: 3 of 3",
        "not expressed: pretrain_run-021: sizes of falcon-7b are in no table of this folder",
    ):
        assert line in printed


def test_a_folder_without_tables_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planner_accuracy.main([str(tmp_path)]) == 2
    assert "holds no tables" in capsys.readouterr().err


@pytest.mark.parametrize("column, value, reason", [
    ("gpu", "TPU-v5", "GPU TPU-v5 is not known"),
    ("framework", "nanoGPT", "no profile describes the framework 'nanoGPT'"),
    ("tp", "3", "tp 3 x pp 1 x cp 1 x dp 128 is not 128 GPUs"),
    ("hidden", "0", "do not divide hidden 0"),
    ("params", "1e12", "the sizes give 6.486e+10 parameters and 1e+12 are stated"),
    ("recompute", "half", "recompute 'half' has no meaning here"),
])  # fmt: skip
def test_a_row_that_cannot_be_expressed_counts_as_wholly_wrong_and_says_why(
    column: str, value: str, reason: str, tmp_path: Path
) -> None:
    with (EXCERPT / "perf_foundry_fsdp.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    rows[0][column] = value
    with pytest.raises(Inexpressible) as caught:
        work_of_row(rows[0])
        planner_speed.profile_of_row(rows[0])
        planner_speed.device_of_row(rows[0])
    assert reason in str(caught.value)
    with (tmp_path / "perf_changed.csv").open("w", newline="") as table:
        writer = csv.DictWriter(table, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    report = "\n".join(planner_accuracy.speed_report(tmp_path, show_fit=False, rounds=1))
    if column != "gpu":
        assert "expressed 3 of 4 (75.0%)" in report
        assert "worst  +100.0% (foundry_fsdp-002)" in report
    assert f"not expressed: foundry_fsdp-002: {caught.value}" in report


def test_leaving_a_configuration_out_does_not_use_its_rows() -> None:
    """Spoiling one configuration's measurements changes how the others are judged, not what it is judged by."""
    cases = [case for case in planner_speed.speed_cases(EXCERPT)[0] if planner_speed.counts(case.row)]
    predict, labels = planner_speed.predictor(cases), [case.row["row_id"] for case in cases]
    measured = np.log(np.array([case.measured for case in cases]))
    weights = planner_speed.weights_of(cases)

    def held_out(values: np.ndarray) -> np.ndarray:
        # From the same start, so that only the rows that are left can tell the fits apart.
        start = planner_fit.linearise(predict, planner_fit.PRIOR)
        return planner_fit.leave_out(start, predict, values, weights, planner_fit.PRIOR, labels)

    spoiled = measured.copy()
    spoiled[0] += 1.0
    before, after = held_out(measured), held_out(spoiled)
    assert after[0] == pytest.approx(before[0], abs=1e-12)
    assert np.abs(after[1:] - before[1:]).max() > 1e-4


def test_tables_that_are_missing_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(EXCERPT / "param_counts.csv", tmp_path)
    assert planner_accuracy.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Parameter counts: 3 of 3")
    assert "Tokens per second" not in printed
