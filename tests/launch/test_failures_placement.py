"""On real raylets: placement read back from Ray's own table and confirmed by every rank; a run that loses a rank and a
node."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator import load_config, make_plan
from orchestrator.errors import PlacementError
from orchestrator.launch.inventory import DOMAIN_LABEL, bundle_nodes, nodes_now, read_nodes
from orchestrator.launch.session import ray_session
from orchestrator.launch.trainer import share_pins, share_resources
from orchestrator.placement.assign import assign_coordinates
from orchestrator.placement.shares import choose_shares
from orchestrator.placement.topology import LocatedShare, PlacedRank, need_of
from orchestrator.plan.run_plan import RunPlan
from tests.launch.conftest import start_toy
from tests.launch.plans import cuda_plan
from tests.launch.soak import Command, Nodes, undisturbed

pytestmark = pytest.mark.ray


@contextlib.contextmanager
def connected(address: str, plan: RunPlan) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", address)
        with ray_session(plan) as ray:
            yield ray


def reserve(ray: Any, bundles: list[dict[str, float]], pins: list[dict[str, str]] | None) -> list[str]:
    """Node of every bundle, once Ray holds them all."""
    more = {} if pins is None else {"bundle_label_selector": pins}
    group = ray.util.placement_group(bundles, strategy="PACK", **more)
    assert group.wait(60)
    nodes = bundle_nodes(group.id.hex())
    ray.util.remove_placement_group(group)
    return nodes


def nodes_of_groups(placed: tuple[PlacedRank, ...]) -> dict[tuple[int, int], set[str]]:
    """Nodes of every tensor-parallel group."""
    nodes: dict[tuple[int, int], set[str]] = defaultdict(set)
    for entry in placed:
        nodes[(entry.pipeline, entry.data)].add(entry.node_id)
    return nodes


@pytest.fixture(scope="module")
def partly_busy() -> Iterator[tuple[Nodes, list[str]]]:
    """Four nodes of four GPUs; somebody else holds one GPU of the first two."""
    nodes = Nodes(0, slots=1, gpus=4)
    ids = [nodes.add(labels={"ray.io/accelerator-type": "A100"}) for _ in range(4)]
    yield nodes, ids
    assert nodes.close() == []


def test_a_partly_busy_cluster_holds_whole_tensor_groups_and_every_rank_confirms_it(
    partly_busy: tuple[Nodes, list[str]], tmp_path: Path
) -> None:
    """Free 3, 3, 4, 4; twelve ranks, tensor groups of two: one GPU of each of the first two nodes stays idle."""
    nodes, ids = partly_busy
    plan = cuda_plan(nodes=3, gpus=4, tensor=2)
    with connected(nodes.address, plan) as ray:
        others = [_Holder.on(ray, node) for node in ids[:2]]
        found = {node.node_id: node for node in read_nodes(ray, "cuda")}
        assert [found[node].slots_free for node in ids] == [3, 3, 4, 4]
        assert {node.kind for node in found.values()} == {"A100"}
        plain = reserve(ray, [{"GPU": 1}] * 12, None)
        assert any(plain[rank] != plain[rank + 1] for rank in range(0, 12, 2)), "plain packing does as well here"
        with pytest.raises(PlacementError, match=r"of another kind than H100-80GB \(A100\) not counted"):
            choose_shares(tuple(found.values()), replace(need_of(plan), kinds=("H100-80GB",)))
    told = start_toy(nodes.address, tmp_path, plan)
    with connected(nodes.address, plan) as ray:
        for other in others:
            ray.kill(ray.get_actor(other, namespace=_Holder.NAMESPACE))
    assert told.outcome.status == "finished", told.outcome.problems
    (ready,) = told.of("ready")
    where = {identity["rank"]: identity["node_id"] for identity in ready["ranks"]}
    assert len(where) == 12
    assert all(where[rank] == where[rank + 1] for rank in range(0, 12, 2))
    assert [list(where.values()).count(node) for node in ids] == [2, 2, 4, 4]
    assert all(len(group) == 1 for group in nodes_of_groups(told.outcome.placement).values())


class _Holder:
    """Somebody else, who holds one GPU of a node whoever is connected."""

    NAMESPACE = "others"

    def here(self) -> bool:
        return True

    @classmethod
    def on(cls, ray: Any, node_id: str) -> str:
        options = {"num_gpus": 1, "num_cpus": 0, "lifetime": "detached", "namespace": cls.NAMESPACE, "name": node_id}
        actor = ray.remote(cls).options(**options, label_selector={"ray.io/node-id": node_id}).remote()
        assert ray.get(actor.here.remote())
        return node_id


def test_a_node_in_doubt_is_asked_itself_and_counts_again_as_soon_as_it_answers(
    partly_busy: tuple[Nodes, list[str]],
) -> None:
    """A raylet that is held stands for a machine that is gone: for Ray it is alive, and so are its slots."""
    nodes, ids = partly_busy
    none: frozenset[str] = frozenset()

    def silent(doubted: set[str]) -> set[str]:
        seen = nodes_now(ray, "cuda", DOMAIN_LABEL, none, doubted)
        assert {node.node_id for node in seen} == set(ids), "for Ray they are all alive"
        return {node.node_id for node in seen if node.silent}

    with connected(nodes.address, cuda_plan(nodes=1, gpus=4)) as ray:
        assert silent(set(ids)) == set()
        with nodes.held(ids[1]):
            assert silent(set(ids)) == {ids[1]}
            assert silent({ids[0]}) == set(), "nodes that nothing was lost on are not asked"
        assert silent(set(ids)) == set()


def test_a_killed_rank_and_a_preempted_node_cost_time_and_nothing_else(
    partly_busy: tuple[Nodes, list[str]], tmp_path: Path
) -> None:
    """Two faults, two ranks, two nodes to spare: the small sister of the soak (`test_failures_soak.py`)."""
    nodes, _ = partly_busy
    words = ("checkpoint.every_steps=10", f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}")
    hurt = Command(nodes, tmp_path, "hurt", ranks=2, steps=30, words=words)
    try:
        hurt.start()
        hurt.wait_for_steps(13, attempt=1)
        hurt.signal(1, signal.SIGKILL, attempt=1)
        hurt.wait_for_steps(3, attempt=2)
        hurt.hold()  # the notice is seen within seconds, and the run shall not be over by then
        leaving = hurt.place(1, attempt=2)["node_id"]
        nodes.drain(leaving, seconds=60)
        hurt.wait(lambda: len(hurt.events("restart")) == 2, "the ranks have saved for the move")
        hurt.release()
        code, said = hurt.ended()
        left = nodes.ranks_running()
    finally:
        hurt.kill()
    assert code == 0, said
    assert left == []
    first, second, third = hurt.summary()["attempts"]
    assert [first["cause"], second["cause"], third["cause"]] == ["crash", "preemption", "finished"]
    assert second["resumed_step"] == hurt.found(2) >= 10
    assert third["resumed_step"] == second["last_step"], "the ranks save before they move"
    assert hurt.place(1, attempt=3)["node_id"] != leaving
    in_place = ["noticed", "killed", "engine imports", "process group", "model", "data and checkpoint", "first step"]
    assert list(second["recovery_parts"]) == in_place
    assert {*in_place, "nodes", "workers", "warm-up"} == third["recovery_parts"].keys()
    assert second["recovery_seconds"] == sum(second["recovery_parts"].values())
    assert [record["step"] for record in hurt.records()] == list(range(1, 31))
    alone = undisturbed(tmp_path, steps=30)
    assert [record["loss"] for record in hurt.records()] == [record["loss"] for record in alone]
    assert [record["samples"] for record in hurt.records()] == [record["samples"] for record in alone]


@pytest.mark.slow
def test_the_128_ranks_of_the_70b_plan_lie_on_16_nodes_of_8_with_every_tensor_group_inside_one(
    tmp_path: Path,
) -> None:
    """Placement only: Ray reserves what a run would hold, and its table says where that lies."""
    plan = make_plan(load_config(["+experiment=llama70b_3d"]))
    nodes = Nodes(0, slots=0, gpus=8)
    try:
        for number in range(16):
            nodes.add(labels={"ray.io/accelerator-type": "A100", "ray.io/gpu-domain": f"rack-{number // 4}"})
        with connected(nodes.address, plan) as ray:
            started = time.monotonic()
            found = read_nodes(ray, "cuda")
            assert len(found) == 16, "the head has no GPU and is no node to place on"
            choice = choose_shares(found, need_of(plan))
            held = reserve(ray, [share_resources("cuda", choice)] * len(choice.node_ids), share_pins(choice))
            names = {node.node_id: node for node in found}
            shares = [
                LocatedShare(share, node, names[node].name, tuple(range(choice.share_size)), names[node].domain)
                for share, node in enumerate(held)
            ]
            placed = assign_coordinates(plan.ranks, shares)
            print(f"128 ranks placed and read back in {time.monotonic() - started:.1f} s")
    finally:
        remains = nodes.close()
    assert remains == []
    assert len(placed) == 128
    assert len({(entry.node_id, entry.device) for entry in placed}) == 128
    groups = nodes_of_groups(placed)
    assert len(groups) == 16
    assert all(len(group) == 1 for group in groups.values())
    # The plan keeps the four data ranks of a pipeline stage next to each other: each stage fills one rack.
    for pipeline in range(4):
        assert len({names[entry.node_id].domain for entry in placed if entry.pipeline == pipeline}) == 1
