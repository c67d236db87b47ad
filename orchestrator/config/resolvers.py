"""What `conf/` may ask about this machine: `${this_machine_memory_gib:N}`, an N-th of its memory.

Only `cluster=local` and `gpu=cpu` ask, so every other configuration is the same everywhere. Registered once, before a
configuration is composed.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Limit of the container's memory under cgroup v2, in bytes, or the word `max`."""


def machine_memory_bytes(cgroup_limit: Path = _CGROUP_LIMIT) -> int:
    """Memory of this machine, or of this container where it may use less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        text = cgroup_limit.read_text(encoding="ascii").strip()
    except OSError:
        return physical
    return min(physical, int(text)) if text.isdigit() else physical


def memory_share_gib(shares: object) -> float:
    """An equal share of this machine's memory, in GiB, rounded down to a tenth, a small one to a thousandth.

    Raises ValueError for no share.
    """
    if isinstance(shares, bool) or not isinstance(shares, int | float) or shares < 1:
        raise ValueError(f"memory is shared by a number of processes of at least 1, not by {shares!r}")
    share = machine_memory_bytes() / shares / 2**30
    digits = 10 if share >= 1 else 1000
    return math.floor(share * digits) / digits


def register() -> None:
    """Make the resolvers known to OmegaConf."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("this_machine_memory_gib", memory_share_gib, replace=True)
