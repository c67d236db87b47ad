"""Our engine without Ray: the same `run_rank`, one process a rank, started by torchrun like the rival.

Tells what of a difference is the engine's and what is the launch's. Prints one JSON line on rank 0.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.benchmarks.engine_ranks --run_directory DIR
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.benchmarks.gate import Gate

STARTED = time.time()
LARGEST_STEPS = 10**6
"""More than any driver lets a rank take."""


class FileLink:
    """A `RankLink` whose ranks find each other through a file; keeps what the rank says."""

    def __init__(self, folder: Path, gate: Gate) -> None:
        self._port = folder / "port"
        self._gate = gate
        self.events: list[dict[str, Any]] = []
        self.phases: dict[str, float] = {}

    def beat(self, phase: str, step: int) -> None:
        """Note when each phase first began; before a step, wait for our turn."""
        self.phases.setdefault(phase, time.time())
        if phase == "reading":
            self._gate.wait()

    def pace(self, own_seconds: float) -> None:
        """Nobody looks for a slow rank here."""

    def report(self, event: dict[str, Any]) -> None:
        """Keep the event."""
        self.events.append({**event, "reported": time.time(), "cpu": time.process_time()})

    def stop_requested(self) -> bool:
        """Never."""
        return False

    def rendezvous(self, port: int | None) -> tuple[str, int]:
        """Rank 0 writes its port, the others wait for it."""
        if port is not None:
            partial = self._port.with_suffix(".partial")
            partial.write_text(str(port), encoding="ascii")
            partial.rename(self._port)
            return "localhost", port
        while not self._port.exists():
            time.sleep(0.002)
        return "localhost", int(self._port.read_text(encoding="ascii"))


def main() -> None:
    """Live as one rank."""
    from orchestrator import load_config, make_plan
    from orchestrator.engine.rank import run_rank
    from orchestrator.plan.rank_task import RankTask
    from tests.benchmarks.workload import Workload

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run_directory", required=True)
    parser.add_argument("--profile", help="write a torch.profiler table of steady steps to this file")
    load, arguments = Workload.from_arguments(parser)
    folder = Path(arguments.run_directory)
    rank = int(os.environ["RANK"])
    gate = Gate(rank)
    if gate.driven:
        load = replace(load, steps=LARGEST_STEPS)
    plan = make_plan(load_config(load.overrides(str(folder))))
    if plan.problems:
        raise SystemExit("\n".join(map(str, plan.problems)))
    link = FileLink(folder, gate)
    task = RankTask(
        plan=plan,
        rank=rank,
        local_rank=rank,
        local_ranks=load.ranks,
        run_directory=str(folder),
        attempt=1,
        threads=load.threads,
        command_started=STARTED,
        environment={},
    )
    if arguments.profile and rank == 0:
        _profile_steps(arguments.profile, load)
    run_rank(task, link)
    if rank == 0:
        steps = [event for event in link.events if event["kind"] == "step"]
        (done,) = (event for event in link.events if event["kind"] == "done")
        print(
            json.dumps(
                {
                    "marks": {"started": STARTED, **link.phases},
                    "ended": [event["reported"] for event in steps],
                    "cpu": [event["cpu"] for event in steps],
                    "loss": steps[-1]["loss"],
                    "first_loss": steps[0]["loss"],
                    "timings": done["result"].get("timings_seconds", {}),
                }
            ),
            flush=True,
        )
    os._exit(0)


def _profile_steps(path: str, load: Any) -> None:
    """Wrap the engine's step so that the profiler sees the same steps as the rival's."""
    import torch

    from orchestrator.engine import train
    from tests.benchmarks.profile_table import write_table

    active = load.steps - load.warm_steps - 1
    schedule = torch.profiler.schedule(wait=load.warm_steps, warmup=1, active=active)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule)
    advance = train._advance
    steps = 0

    def counted(*values: Any, **options: Any) -> None:
        nonlocal steps
        advance(*values, **options)
        steps += 1
        profiler.step()
        if steps == load.steps:
            profiler.stop()
            write_table(profiler, path, active)

    train._advance = counted  # type: ignore[assignment]
    profiler.start()


if __name__ == "__main__":
    main()
