"""Memory rows of published tables against the planner: measured bytes, and what fitted and what did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from orchestrator.plan.memory import memories_of
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.work import Work
from tests.benchmarks.planner_rows import (
    Inexpressible,
    Row,
    configuration,
    gpu_of,
    profile_of_row,
    read_rows,
    work_of_row,
)
from tests.benchmarks.planner_speed import Unexpressed

_UNITS = {"GiB": 2**30, "GB(nvidia-smi, rounded)": 2**30, "GB(rounded up)": 2**30, "GB(as printed)": 1e9}
"""Bytes of a printed unit: nvidia-smi prints MiB, of which its readers make GB by 1024."""


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """One row that says how much memory it took, or whether it ran."""

    row: Row
    work: Work
    profile: SystemProfile
    measured: float | None
    capacity: float
    ran: bool

    def predicted(self, reserve_share: float | None = None) -> float:
        """Bytes of the fullest GPU, with the profile's reserve or another."""
        profile = self.profile if reserve_share is None else replace(self.profile, reserve_share=reserve_share)
        return float(max(memory.total_bytes or 0 for memory in memories_of(self.work, profile)))


def memory_cases(directory: Path) -> tuple[list[MemoryCase], list[Unexpressed]]:
    """Every row that ran or is known not to fit; `measured` where bytes are printed."""
    cases, unexpressed = [], []
    for row in read_rows(directory, "perf_*.csv"):
        if not row["fits"]:
            continue
        try:
            printed = row["mem_per_gpu"]
            if printed and row["mem_unit"] not in _UNITS:
                raise Inexpressible(f"memory unit {row['mem_unit']!r} is not known")
            cases.append(
                MemoryCase(
                    row=row,
                    work=work_of_row(row),
                    profile=profile_of_row(row),
                    measured=float(printed) * _UNITS[row["mem_unit"]] if printed else None,
                    capacity=gpu_of(row).memory_gib * 2**30,
                    ran=row["fits"] == "1",
                )
            )
        except (Inexpressible, KeyError, ValueError) as error:
            unexpressed.append(Unexpressed(row, str(error)))
    return cases, unexpressed


def best_share(cases: Sequence[MemoryCase]) -> float:
    """The reserve share with which half of the cases are predicted too low and half too high."""
    shares = []
    for case in cases:
        if case.measured is not None:
            bare, context = case.predicted(0.0), case.profile.context_bytes
            shares.append((case.measured - context) / (bare - context) - 1.0)
    return median(shares)


def shipped_errors(cases: Sequence[MemoryCase]) -> list[float]:
    """Relative error of every measured case with the profile's own reserve."""
    return [case.predicted() / case.measured - 1.0 for case in cases if case.measured is not None]


def held_out_errors(cases: Sequence[MemoryCase]) -> list[float]:
    """The same with the reserve that the profile's other configurations give; without others, the shipped one."""
    errors = []
    for case in cases:
        if case.measured is None:
            continue
        others = [
            other
            for other in cases
            if other.measured is not None
            and other.profile.reserve_share == case.profile.reserve_share
            and configuration(other.row) != configuration(case.row)
        ]
        share = best_share(others) if others else None
        errors.append(case.predicted(share) / case.measured - 1.0)
    return errors
