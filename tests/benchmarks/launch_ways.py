"""Three ways to run ranks on Ray, measured beside each other: time to the first step, time to mend a killed rank.

    python -m tests.benchmarks.launch_ways [--rounds 3]

A: one Ray Train worker a rank (`TorchTrainer`, its own retries). B: what `orchestrator.launch` does: a Ray Train worker
holds a node share and forks its ranks. C: a placement group and actors of one's own. T: plain torchrun, without Ray.
All run the same two gloo ranks, one optimizer step each; rank 1 kills itself once. Rounds are interleaved, because the
machine's load changes; every run is a fresh process. The decision is in `orchestrator/launch/README.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORLD = 2
WAYS = ("A", "B", "C", "T")


def toy_rank(rank: int, host: str, port: int, marks: str) -> None:
    """Join, take one step, note the time; in the first life rank 1 then kills itself and the other waits for it."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore(host, port, WORLD, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(8, 64)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    folder = Path(marks)
    life = 2 if (folder / "killed").exists() else 1
    if rank == 0:
        (folder / f"first-{life}").write_text(str(time.time()))
    dist.barrier()
    if life == 1 and rank == 1:
        (folder / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def engine(task: Any, link: Any) -> None:
    """`toy_rank` as way B runs it."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    host, port = link.rendezvous(port if task.rank == 0 else None)
    link.report({"kind": "ready", "rank": task.rank, "host": host, "pid": os.getpid(), "device": "cpu"})
    link.beat("stepping", task.attempt)
    toy_rank(task.rank, host, port, task.environment["MARKS"])
    link.report({"kind": "done", "rank": task.rank, "status": "finished", "step": 1, "result": {}})


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def way_a(marks: str) -> None:
    """One Ray Train worker a rank."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def train(config: dict[str, Any]) -> None:
        import ray.train
        import torch.distributed as dist

        rank = ray.train.get_context().get_world_rank()
        dist.destroy_process_group()
        port = config["port"] + (1 if (Path(config["marks"]) / "killed").exists() else 0)
        toy_rank(rank, "127.0.0.1", port, config["marks"])

    ray.init(address="local", num_cpus=WORLD, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    TorchTrainer(
        train,
        train_loop_config={"marks": marks, "port": _free_port()},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=WORLD),
        run_config=RunConfig(storage_path=marks, failure_config=FailureConfig(max_failures=1)),
    ).fit()


def way_b(marks: str) -> None:
    """Supervisors held by Ray Train, ranks forked."""
    from orchestrator.launch.request import LaunchRequest
    from orchestrator.launch.run import launch
    from tests.launch.plans import cpu_plan

    started = float(os.environ["STARTED"])
    engine_name = "tests.benchmarks.launch_ways:engine"
    environment = {"MARKS": marks}
    preload = ("torch", "torch._dynamo", "torch.distributed")
    request = LaunchRequest(cpu_plan(slots=WORLD), marks, started, engine_name, environment, preload)
    outcome = launch(request, lambda event: None)
    assert outcome.status == "finished", outcome.problems


def way_c(marks: str) -> None:
    """A placement group and actors of one's own."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init(address="local", num_cpus=WORLD, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    group = placement_group([{"CPU": 1}] * WORLD, strategy="PACK")
    ray.get(group.ready())

    @ray.remote(num_cpus=1)
    class Rank:
        def run(self, rank: int, port: int) -> None:
            toy_rank(rank, "127.0.0.1", port, marks)

    for _ in range(2):
        port = _free_port()
        actors = [
            Rank.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
            for index in range(WORLD)
        ]
        try:
            ray.get([actor.run.remote(rank, port) for rank, actor in enumerate(actors)])
            return
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError):
            for actor in actors:
                ray.kill(actor)


def way_t(marks: str) -> None:
    """Plain torchrun, one restart allowed."""
    script = Path(marks) / "torchrun_rank.py"
    port = _free_port()
    script.write_text(
        "import os, pathlib\nfrom tests.benchmarks.launch_ways import toy_rank\n"
        f"port = {port} + (1 if (pathlib.Path({marks!r}) / 'killed').exists() else 0)\n"
        f"toy_rank(int(os.environ['RANK']), '127.0.0.1', port, {marks!r})\n"
    )
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD), "--max-restarts", "1"]
    subprocess.run([sys.executable, *command, str(script)], check=True)


def measure(way: str) -> dict[str, float]:
    """One fresh process of `way`: seconds to the first step, to the first step after the kill, and to its end."""
    with tempfile.TemporaryDirectory() as marks:
        started = time.time()
        environment = {
            **os.environ,
            "STARTED": str(started),
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
            "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "tests.benchmarks.launch_ways", "--run", way, "--marks", marks]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        noted = {name: float((Path(marks) / name).read_text()) for name in ("first-1", "killed", "first-2")}
        return {
            "first_step": noted["first-1"] - started,
            "mended": noted["first-2"] - noted["killed"],
            "end": time.time() - started,
        }


def main() -> None:
    """Interleaved rounds and their medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", choices=WAYS)
    parser.add_argument("--marks")
    arguments = parser.parse_args()
    if arguments.run:
        {"A": way_a, "B": way_b, "C": way_c, "T": way_t}[arguments.run](arguments.marks)
        return
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(arguments.rounds):
        for way in WAYS:
            results[way].append(measure(way))
            print(json.dumps({"round": number, "way": way, **results[way][-1]}), flush=True)
    print("| way | first step, s | mended, s | end, s |\n|---|---|---|---|")
    for way, runs in results.items():
        cells = [f"{statistics.median(run[name] for run in runs):.2f}" for name in ("first_step", "mended", "end")]
        print(f"| {way} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
