"""Who is compared with whom in `peers.py`: a group is a kind of plan, its rivals, ours, and what is to be reached.

The targets are the project's own; the ratios of the other projects to torchrun DDP were measured on a machine of two
cores with gloo and the same workload, one run each, FP32.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.benchmarks.ddp import KEEP_FREED_MEMORY
from tests.benchmarks.workload import Workload

BASE = "torchrun DDP"
GROUPS = ("replicated", "zero2", "zero3", "split")
PLANS: dict[str, tuple[str, dict[str, int], float]] = {
    "TP 2": ("picotron 0.70, torchtitan 0.71", {"tensor": 2}, 0.71),
    "PP 2": ("picotron 0.78", {"pipeline": 2, "micro_batches": 4}, 0.78),
    "DP 2 x TP 2 x PP 2": ("picotron 0.60", {"ranks": 8, "tensor": 2, "pipeline": 2, "micro_batches": 4}, 0.60),
}
"""Plans of the group `split`: what others reached as ratios to torchrun DDP, the plan, the best of those ratios."""


@dataclass(frozen=True)
class Contestant:
    """One kind of training process, and what it is held against."""

    name: str
    module: str
    load: Workload
    python: str = sys.executable
    kept_malloc: bool = False
    targets: dict[str, float] = field(default_factory=dict)
    """Ours only: {opponent: ratio to reach}."""
    note: str = ""

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.load.ranks

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its ranks."""
        kept = KEEP_FREED_MEMORY if self.kept_malloc else {}
        beside = str(Path(self.python).parent)
        return {"OMP_NUM_THREADS": str(self.load.threads), "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}", **kept}

    def command(self, home: Path) -> list[str]:
        """Of one rank; `home` is an empty folder of this contestant."""
        own = [f"--run_directory={home}"] if self.module == "engine_ranks" else []
        return [self.python, "-m", f"tests.benchmarks.{self.module}", *own, *self.load.arguments()]


def contestants_of(
    group: str, load: Workload, deepspeed_python: str | None, malloc: Sequence[str]
) -> tuple[Contestant, ...]:
    """The contestants of a group, torchrun DDP first."""
    base = Contestant(BASE, "rival_ddp", load)
    if group == "split":
        ours = [
            Contestant(f"ours {name}", "engine_ranks", replace(load, **plan), targets={BASE: best}, note=others)
            for name, (others, plan, best) in PLANS.items()
        ]
        return (base, *ours)
    stages = {"replicated": (0, 1), "zero2": (2,), "zero3": (3,)}[group]
    rivals: list[Contestant] = []
    ours = []
    for stage in stages:
        own = replace(load, zero_stage=stage)
        targets = {BASE: 0.95}
        for kind in malloc:
            for rival in _rivals(stage, own, deepspeed_python):
                suffix, kept = (", malloc kept", True) if kind == "kept" else ("", False)
                if rival.name == BASE and not kept:
                    continue
                rivals.append(replace(rival, name=rival.name + suffix, kept_malloc=kept))
                targets[rivals[-1].name] = 1.0 if rival.module == "rival_fsdp" else 0.95
        ours.append(Contestant(f"ours ZeRO-{stage}", "engine_ranks", own, targets=targets))
    return (base, *rivals, *ours)


def _rivals(stage: int, load: Workload, deepspeed_python: str | None) -> list[Contestant]:
    """Those that offer a stage."""
    found = []
    if stage == 0:
        found.append(Contestant(BASE, "rival_ddp", load))
    if stage >= 2:
        found.append(Contestant(f"FSDP2 loop, ZeRO-{stage}", "rival_fsdp", load))
    if stage >= 1 and deepspeed_python is not None:
        found.append(Contestant(f"DeepSpeed ZeRO-{stage}", "rival_deepspeed", load, python=deepspeed_python))
    return found
