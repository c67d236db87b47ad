"""Throughput rows of published tables against the planner, as shipped and by leave-one-configuration-out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from orchestrator.plan.constants import FITTED, Fitted
from orchestrator.plan.device import Device
from orchestrator.plan.step_seconds import step_seconds
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.work import Work
from tests.benchmarks.planner_fit import PRIOR, Array, Fit, Predict, fit_all, leave_out
from tests.benchmarks.planner_rows import (
    Inexpressible,
    Row,
    configuration,
    device_of_row,
    profile_of_row,
    read_rows,
    work_of_row,
)


@dataclass(frozen=True, slots=True)
class SpeedCase:
    """One row with a measured throughput."""

    row: Row
    work: Work
    profile: SystemProfile
    device: Device
    measured: float
    """Tokens a second and GPU."""


@dataclass(frozen=True, slots=True)
class Unexpressed:
    """A row that the planner cannot state, with the reason."""

    row: Row
    reason: str


def measured_rate(row: Row) -> float | None:
    """Tokens a second and GPU, printed or from model TFLOP/s; None if neither is there."""
    if row["tokens_per_s_per_gpu"]:
        return float(row["tokens_per_s_per_gpu"])
    if row["tflops_kind"] == "model" and row["tflops_per_gpu_reported"] and row["flops_per_token_palm"]:
        return float(row["tflops_per_gpu_reported"]) * 1e12 / float(row["flops_per_token_palm"])
    return None


def counts(row: Row) -> bool:
    """Whether the row belongs to the headline: 16 bits, A100 or H100, quality high or medium."""
    return (
        row["precision"] in ("bf16", "fp16")
        and row["gpu"].startswith(("A100", "H100"))
        and row["quality"] in ("high", "medium")
    )


def speed_cases(directory: Path) -> tuple[list[SpeedCase], list[Unexpressed]]:
    """Every row with a throughput, as a case or with the reason why it cannot be one."""
    cases, unexpressed = [], []
    for row in read_rows(directory, "perf_*.csv"):
        measured = measured_rate(row)
        if measured is None:
            continue
        try:
            case = SpeedCase(row, work_of_row(row), profile_of_row(row), device_of_row(row), measured)
            if predicted_rate(case, FITTED) is None:
                raise Inexpressible("a rate of the hardware is not known")
            cases.append(case)
        except (Inexpressible, KeyError, ValueError) as error:
            unexpressed.append(Unexpressed(row, str(error)))
    return cases, unexpressed


def predicted_rate(case: SpeedCase, fitted: Fitted) -> float | None:
    """Tokens a second and GPU by the planner."""
    seconds = step_seconds(case.work, case.profile, case.device, fitted)
    return None if seconds is None else case.work.tokens_per_step / seconds.step / case.work.parallel.world_size


def predictor(cases: Sequence[SpeedCase]) -> Predict:
    """Logarithm of the predicted throughput of every case under given numbers."""

    def predict(fitted: Fitted) -> Array:
        logs: Array = np.log(np.array([predicted_rate(case, fitted) for case in cases], dtype=np.float64))
        return logs

    return predict


def weights_of(cases: Sequence[SpeedCase]) -> Array:
    """Weight of each row: a configuration with many rows counts as the root of their number."""
    labels = [configuration(case.row) for case in cases]
    weights: Array = np.array([labels.count(label) ** -0.5 for label in labels], dtype=np.float64)
    weights /= weights.mean()
    return weights


def relative_errors(logs: Array, cases: Sequence[SpeedCase]) -> Array:
    """Predicted / measured - 1."""
    measured: Array = np.array([case.measured for case in cases], dtype=np.float64)
    errors: Array = np.exp(logs) / measured - 1.0
    return errors


def fit_speed(cases: Sequence[SpeedCase]) -> Fit:
    """The numbers fitted to all cases."""
    return fit_all(predictor(cases), _log_measured(cases), weights_of(cases), PRIOR)


def held_out_errors(cases: Sequence[SpeedCase], fit: Fit, rounds: int) -> Array:
    """Relative error of each case by numbers fitted without its configuration."""
    labels = [configuration(case.row) for case in cases]
    logs = leave_out(fit, predictor(cases), _log_measured(cases), weights_of(cases), PRIOR, labels, rounds)
    return relative_errors(logs, cases)


def _log_measured(cases: Sequence[SpeedCase]) -> Array:
    logs: Array = np.log(np.array([case.measured for case in cases], dtype=np.float64))
    return logs
