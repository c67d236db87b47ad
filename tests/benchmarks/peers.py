"""Ours against the best that others offer for the same plan: torchrun DDP, a hand-written FSDP2 loop, DeepSpeed ZeRO.

All contestants of a group are alive together and take turns of a few steps (`gate.py`); reported are medians of the
ratios within a round, with their quartiles, by the clock and by processor time. Rivals run twice: as they come, and
with the setting of glibc's malloc that our ranks make. The README says how to read the table.

    python -m tests.benchmarks.peers                                   # all groups, 9 rounds, FP32
    python -m tests.benchmarks.peers --groups zero3 --deepspeed_python ENV/bin/python --precision bf16_mixed
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.benchmarks.ddp import machine
from tests.benchmarks.peers_contestants import GROUPS, Contestant, contestants_of
from tests.benchmarks.peers_table import comparison_lines, speed_lines
from tests.benchmarks.turns import Driver, Turn
from tests.benchmarks.workload import Workload


@dataclass
class Measured:
    """All turns of a group: one list a contestant, one turn a round."""

    group: str
    contestants: tuple[Contestant, ...]
    turns: dict[str, list[Turn]] = field(default_factory=dict)


def main() -> None:
    """Run the groups, print a table for each, and write every turn as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turn_steps", type=int, default=4, help="steps of one contestant in one round")
    parser.add_argument(
        "--deepspeed_python", help="Python of an environment with DeepSpeed; without it, it is left out"
    )
    parser.add_argument("--malloc", nargs="+", choices=("default", "kept"), default=["default", "kept"])
    parser.add_argument("--output", type=Path, default=Path("peers_benchmark.json"))
    load, arguments = Workload.from_arguments(parser)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores: above 1, trust ratios and processor time")
    found = []
    for group in arguments.groups:
        contestants = contestants_of(group, load, arguments.deepspeed_python, arguments.malloc)
        measured = measure(group, contestants, arguments.rounds, arguments.turn_steps)
        found.append(measured)
        print(f"\n{group}, {load.precision}: {arguments.rounds} rounds of {arguments.turn_steps} steps")
        print("\n".join(speed_lines(contestants, measured.turns, arguments.turn_steps)))
        print("\n".join(comparison_lines(contestants, measured.turns)), flush=True)
        # After each group: the next may take long, and what was measured remains.
        write(arguments.output, load, found)
    print(f"\nAll turns: {arguments.output}")


def write(path: Path, load: Workload, found: Sequence[Measured]) -> None:
    """Everything as JSON."""
    groups = [
        {"group": entry.group, "turns": {name: [asdict(turn) for turn in own] for name, own in entry.turns.items()}}
        for entry in found
    ]
    text = json.dumps({"workload": asdict(load), "machine": machine(), "groups": groups}, indent=1)
    path.write_text(text, encoding="utf-8")


def measure(group: str, contestants: Sequence[Contestant], rounds: int, turn_steps: int) -> Measured:
    """Start all contestants one after another, then let each compute once a round, in turning order."""
    measured = Measured(group, tuple(contestants), {contestant.name: [] for contestant in contestants})
    with tempfile.TemporaryDirectory(prefix="peers-") as folder, contextlib.ExitStack() as stack:
        drivers = []
        for index, contestant in enumerate(contestants):
            home = Path(folder) / str(index)
            home.mkdir()
            started = time.time()
            driver = stack.enter_context(
                Driver(contestant.command(home), contestant.ranks, contestant.environment, home)
            )
            driver.turn(contestant.load.warm_steps)
            drivers.append(driver)
            print(f"  {contestant.name}: warm after {time.time() - started:.0f} s", file=sys.stderr, flush=True)
        for round_ in range(rounds):
            for place in range(len(contestants)):
                index = (round_ + place) % len(contestants)
                measured.turns[contestants[index].name].append(drivers[index].turn(turn_steps))
            print(f"  round {round_ + 1} of {rounds}", file=sys.stderr, flush=True)
    return measured


if __name__ == "__main__":
    main()
