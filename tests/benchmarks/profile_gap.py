"""Where a difference in speed lies: our engine and a rival's loop, operator by operator.

Runs both without Ray under torch.profiler and prints the operators whose own time differs most, in milliseconds a step
of rank 0.

    python -m tests.benchmarks.profile_gap --precision fp32
    python -m tests.benchmarks.profile_gap --rival rival_fsdp --zero_stage 3
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.ddp import TIMEOUT_SECONDS, TORCHRUN
from tests.benchmarks.workload import Workload

_ROWS = 25


def main() -> None:
    """Profile both and print the difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rival", choices=("rival_ddp", "rival_fsdp"), default="rival_ddp")
    load, arguments = Workload.from_arguments(parser)
    with tempfile.TemporaryDirectory(prefix="profile-") as folder:
        ours = profile("tests.benchmarks.engine_ranks", load, Path(folder), [f"--run_directory={folder}"])
        rival = profile(f"tests.benchmarks.{arguments.rival}", load, Path(folder), [])
    print(f"{'own ms a step':<52}{'ours':>16}{'rival':>16}{'difference':>12}")
    print(f"{'all operators':<52}{_total(ours):>16.1f}{_total(rival):>16.1f}{_total(ours) - _total(rival):>12.1f}")
    nothing = (0.0, 0.0)
    names = sorted(
        ours.keys() | rival.keys(), key=lambda name: -abs(ours.get(name, nothing)[1] - rival.get(name, nothing)[1])
    )
    for name in names[:_ROWS]:
        (calls, mine), (rival_calls, its) = ours.get(name, nothing), rival.get(name, nothing)
        columns = f"{f'{mine:.1f} in {calls:.0f}':>16}{f'{its:.1f} in {rival_calls:.0f}':>16}{mine - its:>12.1f}"
        print(f"{name[:50]:<52}{columns}")


def profile(module: str, load: Workload, folder: Path, options: list[str]) -> dict[str, tuple[float, float]]:
    """{operator: (calls, own milliseconds)} of a steady step of rank 0."""
    table = folder / f"{module}.json"
    command = [
        sys.executable,
        *TORCHRUN,
        str(load.ranks),
        "-m",
        module,
        *load.arguments(),
        f"--profile={table}",
        *options,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(load.threads), "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(command, env=environment, timeout=TIMEOUT_SECONDS, check=True, stdout=subprocess.DEVNULL)
    return {name: (calls, own) for name, (calls, own) in json.loads(table.read_text(encoding="utf-8")).items()}


def _total(table: dict[str, tuple[float, float]]) -> float:
    return sum(own for _, own in table.values())


if __name__ == "__main__":
    main()
