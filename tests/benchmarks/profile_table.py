"""What a profiler saw, per step and operator, as JSON: the raw material of `profile_gap.py`."""

from __future__ import annotations

import json
from pathlib import Path

import torch


def write_table(profiler: torch.profiler.profile, path: str, steps: int) -> None:
    """Write {operator: [calls, milliseconds of its own]} per step."""
    table = {
        event.key: [event.count / steps, event.self_cpu_time_total / 1000 / steps]
        for event in profiler.key_averages()
        if not event.key.startswith("ProfilerStep")
    }
    Path(path).write_text(json.dumps(table), encoding="utf-8")
