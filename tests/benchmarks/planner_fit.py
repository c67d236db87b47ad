"""Fitting of the planner's numbers to measured step times: damped least squares on the logarithm of the error.

Every number is positive and is fitted as its logarithm, pulled weakly towards where it starts, with errors beyond a
bound counted linearly (Huber), so that no single row drags the fit. `leave_out` refits without each configuration in
turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from orchestrator.plan.constants import Fitted

Array = NDArray[np.float64]
Predict = Callable[[Fitted], Array]
"""Logarithm of the predicted quantity of every row under given numbers."""

PRIOR = Fitted(
    product_share=0.8,
    product_fall=0.15,
    young_loss=0.3,
    young_months=24.0,
    product_passes=1.0,
    eager_passes=1.5,
    fused_passes=1.0,
    flash_share=0.45,
    flash_fused_share=0.7,
    score_bytes=13.0,
    odd_head_factor=4.0,
    odd_width_factor=1.2,
    block_overhead_seconds=2e-4,
    nvlink_share=0.8,
    network_share=0.7,
    tensor_hidden=0.7,
    data_exposed=0.15,
    context_exposed=0.3,
    pipeline_exposed=0.5,
    jitter=0.005,
    loss_bytes=24.0,
    step_overhead_seconds=0.03,
)
"""Where every fit starts and what it is weakly pulled to: round guesses from counting kernels and from data sheets.
The shipped numbers are not used, so that a fit without a configuration knows nothing of it."""

NAMES = tuple(field.name for field in fields(Fitted))
HUBER = 0.12
"""Log error up to which a row counts quadratically."""
PULL = 0.35
"""Weight of a number's distance (in logarithms) from its start, relative to a row's error."""
LARGEST = {"product_share": 0.92}
"""Upper bounds other than those of shares: no measured matrix product does better on an A100 (0.87 of its peak)."""
SHARES = frozenset(name for name in NAMES if name.endswith(("_share", "_hidden", "_exposed", "_loss")))
"""Numbers that stay between 0 and 1."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted numbers and the predictions' derivatives there."""

    values: Fitted
    jacobian: Array
    """[rows, numbers], by logarithm."""
    predicted: Array
    """Logarithms [rows]."""


def to_logs(values: Fitted) -> Array:
    """Logarithms of the numbers, in the order of `NAMES`."""
    logs: Array = np.log(np.array([getattr(values, name) for name in NAMES], dtype=np.float64))
    return logs


def from_logs(logs: Array, like: Fitted) -> Fitted:
    """The numbers again; shares are kept below 1."""
    found = {name: float(np.exp(log)) for name, log in zip(NAMES, logs, strict=True)}
    bounds = {name: LARGEST.get(name, 0.98 if name in SHARES else float("inf")) for name in NAMES}
    return replace(like, **{name: min(value, bounds[name]) for name, value in found.items()})


def linearise(predict: Predict, values: Fitted, step: float = 0.02) -> Fit:
    """Predictions and their derivatives by the logarithm of each number."""
    logs, predicted = to_logs(values), predict(values)
    columns: list[Array] = []
    for index in range(len(NAMES)):
        moved = logs.copy()
        moved[index] += step
        changed = from_logs(moved, values)
        taken = float(to_logs(changed)[index] - logs[index])
        if abs(taken) < step / 2:
            moved[index] = logs[index] - step
            changed, taken = from_logs(moved, values), -step
        column: Array = (predict(changed) - predicted) / taken
        columns.append(column)
    jacobian: Array = np.stack(columns, axis=1)
    return Fit(values, jacobian, predicted)


def huber_cost(errors: Array, logs: Array, start: Array, weights: Array) -> float:
    """What the fit minimises."""
    size = np.abs(errors)
    rows = np.where(size <= HUBER, 0.5 * errors**2, HUBER * (size - 0.5 * HUBER))
    return float((weights * rows).sum() + 0.5 * PULL**2 * HUBER**2 * ((logs - start) ** 2).sum())


def improve(fit: Fit, measured: Array, weights: Array, start: Array, damping: float) -> Array:
    """Logarithms after one damped Gauss-Newton step."""
    errors = fit.predicted - measured
    robust = weights * np.minimum(1.0, HUBER / np.maximum(np.abs(errors), 1e-9))
    logs = to_logs(fit.values)
    pull = PULL**2 * HUBER**2
    weighted = fit.jacobian * robust[:, None]
    normal = fit.jacobian.T @ weighted + (pull + damping) * np.eye(len(logs))
    gradient = weighted.T @ errors + pull * (logs - start)
    step: Array = np.linalg.solve(normal, -gradient).astype(np.float64)
    return logs + np.clip(step, -0.7, 0.7)


def fit_all(predict: Predict, measured: Array, weights: Array, start: Fitted, rounds: int = 30) -> Fit:
    """Fit to every row."""
    origin = to_logs(start)
    fit = linearise(predict, start)
    cost = huber_cost(fit.predicted - measured, origin, origin, weights)
    damping = 0.03
    for _ in range(rounds):
        candidate = from_logs(improve(fit, measured, weights, origin, damping), start)
        errors = predict(candidate) - measured
        new = huber_cost(errors, to_logs(candidate), origin, weights)
        if new < cost:
            done = cost - new < 1e-5 * cost
            fit, cost, damping = linearise(predict, candidate), new, damping / 3
            if done:
                break
        else:
            damping *= 4
            if damping > 100:
                break
    return fit


def leave_out(
    fit: Fit,
    predict: Predict,
    measured: Array,
    weights: Array,
    start: Fitted,
    groups: Sequence[str],
    rounds: int = 2,
) -> Array:
    """Predictions (logarithms) of every row by numbers that were fitted without the row's configuration.

    Each configuration's numbers follow from the full fit by `rounds` Gauss-Newton steps on the remaining rows, each
    damped until those fit better than before; from the second on with derivatives taken anew.
    """
    origin, labels = to_logs(start), np.array(groups)
    held_out = np.empty_like(measured)
    for label in dict.fromkeys(groups):
        out = labels == label
        kept = np.where(out, 0.0, weights)
        best = fit
        for number in range(rounds):
            tried = _step_without(best, predict, measured, kept, start, origin)
            if tried is None:
                break
            values, predicted = tried
            again = number + 1 < rounds
            best = linearise(predict, values) if again else Fit(values, best.jacobian, predicted)
        held_out[out] = best.predicted[out]
    return held_out


def _step_without(
    fit: Fit, predict: Predict, measured: Array, kept: Array, start: Fitted, origin: Array
) -> tuple[Fitted, Array] | None:
    """Numbers and predictions after one step that improves the kept rows; None when even the most damped does not,
    which means that they are at their best already."""
    logs = to_logs(fit.values)
    before = huber_cost(fit.predicted - measured, logs, origin, kept)
    for damping in (1e-3, 1e-2, 0.1, 1.0, 10.0):
        values = from_logs(improve(fit, measured, kept, origin, damping), start)
        predicted = predict(values)
        if huber_cost(predicted - measured, to_logs(values), origin, kept) < before:
            return values, predicted
    return None
