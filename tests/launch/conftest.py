"""Ray for the launch tests: one cluster of two nodes a session, and a launch that records what it is told."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.launch.request import LaunchOutcome, LaunchRequest
from orchestrator.launch.session import prepare_environment
from orchestrator.plan.run_plan import RunPlan

TOY = "tests.launch.toy_engine:run"

# Ray decides when it is imported whether its nodes may use loopback, so this comes before any test imports it.
os.environ.pop("RAY_ADDRESS", None)
prepare_environment()


@dataclass
class Told:
    """An outcome and all events on the way to it."""

    outcome: LaunchOutcome
    events: list[dict[str, Any]]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[str]:
    """Address of a cluster of two nodes with two CPU slots each."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            **small,
            "include_dashboard": False,
            "no_monitor": True,
            "include_log_monitor": False,
            # On a machine that is busy with other things a node may answer late; it is not dead for that.
            "_system_config": {"health_check_failure_threshold": 100},
        },
    )
    cluster.add_node(**small)
    yield cluster.address
    cluster.shutdown()


Start = Callable[..., Told]
OnEvent = Callable[[dict[str, Any]], None]


def start_toy(
    address: str, folder: Path, plan: RunPlan, on_event: OnEvent | None = None, toy: dict[str, object] | None = None
) -> Told:
    """Launch `plan` with the toy engine on the cluster at `address`; `toy` holds its `TOY_*` settings."""
    from orchestrator.launch.run import launch

    events: list[dict[str, Any]] = []

    def observe(event: dict[str, Any]) -> None:
        events.append(event)
        if on_event is not None:
            on_event(event)

    environment = {f"TOY_{name}": str(value) for name, value in (toy or {}).items()}
    request = LaunchRequest(plan, str(folder), time.time(), TOY, environment, preload=())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", address)
        return Told(launch(request, observe), events)


@pytest.fixture
def start(two_nodes: str, tmp_path: Path) -> Start:
    """Launches a plan on the two nodes with the toy engine; `on_event` hears of events as they come."""

    def run(plan: RunPlan, *, on_event: OnEvent | None = None, **toy: object) -> Told:
        return start_toy(two_nodes, tmp_path, plan, on_event, {name.upper(): value for name, value in toy.items()})

    return run


def processes_with(mark: str) -> list[int]:
    """Living processes whose environment holds `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if mark.encode() in environment:
                found.append(int(entry.name))
    return found
