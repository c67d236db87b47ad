"""Looking for nodes: refused, waited for, planned anew for what remains, grown back. No Ray, the time is a number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.config.schema import FaultToleranceConfig
from orchestrator.errors import PlacementError
from orchestrator.launch.placing import Placing
from orchestrator.placement.shares import choose_shares
from orchestrator.placement.topology import Node, need_of
from orchestrator.plan.make import make_plan
from orchestrator.plan.run_plan import RunPlan
from tests.launch.plans import cpu_plan


class Cluster:
    """Nodes, and attempts that take what they need of them."""

    def __init__(self, plan: RunPlan, free: list[int], **tolerance: Any) -> None:
        self.nodes = [Node(f"n{i}", f"node{i}", slots, slots) for i, slots in enumerate(free)]
        self.events: list[dict[str, Any]] = []
        self.seen_at: list[float] = []
        self.placing = Placing(plan, FaultToleranceConfig(**tolerance), self.events.append)

    def look(self, now: float):
        def see() -> list[Node]:
            self.seen_at.append(now)
            return self.nodes

        return self.placing.attempt(now, see, Attempt)

    @property
    def held(self) -> dict[str, int]:
        """What an attempt on all slots holds."""
        return {node.node_id: node.slots_total for node in self.nodes}

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


class Attempt:
    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan

    def begin(self, nodes: Sequence[Node]) -> None:
        choose_shares(nodes, need_of(self.plan))


def plan(nodes: int = 4, slots: int = 1) -> RunPlan:
    """Data-parallel over nodes x slots, batch 12."""
    made = cpu_plan(nodes=nodes, slots=slots)
    training = made.config.training.model_copy(update={"global_batch_size": 12, "precision": "fp32"})
    return make_plan(made.config.model_copy(update={"training": training}))


def test_what_fits_begins_at_once():
    cluster = Cluster(plan(), [1, 1, 1, 1])
    assert cluster.look(100.0).plan is cluster.placing.plan
    assert cluster.events == []


def test_at_the_start_what_can_never_fit_is_refused_at_once():
    with pytest.raises(PlacementError, match=r"needs 4 CPU slots; 3 nodes hold 1 \+ 1 \+ 1"):
        Cluster(plan(), [1, 1, 1]).look(100.0)


def lost(free: list[int], noticed: float = 100.0, **tolerance: Any) -> Cluster:
    """A run that began on four nodes and has these left."""
    cluster = Cluster(plan(), [1, 1, 1, 1], **tolerance)
    assert cluster.look(0.0)
    cluster.nodes = [Node(f"n{i}", f"node{i}", slots, slots) for i, slots in enumerate(free)]
    cluster.placing.again(noticed, cluster.held)
    return cluster


def test_lost_nodes_are_waited_for_and_the_reason_the_limit_and_what_comes_then_are_said():
    cluster = lost([1, 1, 1], replan_after_seconds=30)
    assert cluster.look(100.0) is None
    (waiting,) = cluster.of("waiting")
    assert "needs 4 CPU slots; 3 nodes hold 1 + 1 + 1" in waiting["reason"]
    assert (waiting["limit_seconds"], waiting["then"]) == (30, ", then the run goes on with fewer data ranks")


def test_nodes_that_come_back_in_time_are_taken_with_the_same_plan():
    cluster = lost([1, 1, 1], replan_after_seconds=30)
    assert cluster.look(100.0) is None
    cluster.nodes.append(Node("n9", "node9", 1, 1))
    begun = cluster.look(105.0)
    assert begun.plan.parallel.data == 4
    assert cluster.of("replanned") == []


def test_nodes_gone_for_good_leave_fewer_data_ranks_at_the_same_batch():
    cluster = lost([1, 1, 1], replan_after_seconds=30)
    assert cluster.look(100.0) is None
    begun = cluster.look(131.0)
    assert (begun.plan.parallel.data, begun.plan.parallel.micro_batches) == (3, 4)
    (event,) = cluster.of("replanned")
    assert (event["world_size"], event["idle"]) == (3, {})
    assert event["reason"] == "needs 4 CPU slots; 3 nodes hold 1 + 1 + 1."
    assert "parallel.data 4 -> 3" in event["changes"]


def test_slots_that_the_smaller_plan_leaves_idle_are_named_by_node():
    big = Cluster(plan(nodes=5, slots=2), [2, 2, 2, 2, 2], replan_after_seconds=0)
    assert big.placing.plan.problems  # 10 ranks do not divide the batch of 12, so this plan would never have run
    cluster = Cluster(plan(nodes=3, slots=2), [2, 2, 2], replan_after_seconds=0)
    assert cluster.look(0.0)
    cluster.nodes = [Node("a", "left", 2, 2), Node("b", "right", 3, 3)]
    cluster.placing.again(10.0, cluster.held)
    assert cluster.look(10.0).plan.parallel.data == 4
    assert cluster.of("replanned")[0]["idle"] == {"right": 1}


def test_without_leave_to_plan_anew_the_run_ends_when_its_patience_does():
    cluster = lost([1, 1, 1], replan_after_seconds=None, placement_timeout_seconds=20)
    assert cluster.look(100.0) is None
    with pytest.raises(PlacementError, match="needs 4 CPU slots"):
        cluster.look(121.0)


def test_what_remains_may_hold_no_plan_at_all_and_then_the_arithmetic_is_told():
    cluster = lost([], replan_after_seconds=0)
    with pytest.raises(PlacementError, match="nodes are gone, and what remains holds no plan"):
        cluster.look(100.0)


def test_after_another_loss_the_smaller_plan_goes_on_without_another_wait():
    cluster = lost([1, 1, 1], replan_after_seconds=30)
    assert cluster.look(100.0) is None
    assert cluster.look(131.0)
    cluster.placing.again(200.0, cluster.held)
    being_freed(cluster)
    assert cluster.look(200.0) is None
    freed(cluster)
    assert cluster.look(200.25).plan.parallel.data == 3


def being_freed(cluster: Cluster) -> None:
    """What the attempt before has held is still counted as held."""
    cluster.nodes = [replace(node, slots_free=0) for node in cluster.nodes]


def freed(cluster: Cluster) -> None:
    cluster.nodes = [replace(node, slots_free=node.slots_total) for node in cluster.nodes]


def test_when_the_nodes_are_back_at_the_next_failure_the_plan_of_the_beginning_is_taken_again():
    cluster = lost([1, 1, 1], replan_after_seconds=30)
    assert cluster.look(100.0) is None
    assert cluster.look(131.0)
    cluster.nodes.append(Node("n9", "node9", 1, 1))
    cluster.placing.again(200.0, cluster.held)
    assert cluster.look(200.0).plan.parallel.data == 4
    assert cluster.of("replanned")[-1]["world_size"] == 4


def test_nodes_that_are_about_to_leave_count_as_gone():
    cluster = lost([1, 1, 1, 1], replan_after_seconds=30)
    cluster.nodes[0] = replace(cluster.nodes[0], leaving=True)
    assert cluster.look(100.0) is None
    assert cluster.look(131.0).plan.parallel.data == 3


def silent(cluster: Cluster, number: int) -> None:
    """The node still counts for the cluster, its slots as held; it answers nobody."""
    cluster.nodes[number] = replace(cluster.nodes[number], slots_free=0, silent=True)


def test_a_node_that_does_not_answer_is_lost_and_not_busy_whatever_the_cluster_says_of_it():
    cluster = lost([1, 1, 1, 1], replan_after_seconds=30, placement_timeout_seconds=600)
    silent(cluster, 2)
    assert cluster.look(100.0) is None
    (waiting,) = cluster.of("waiting")
    assert waiting["reason"] == "needs 4 CPU slots; 3 nodes hold 1 + 1 + 1; 1 node that does not answer not counted."
    assert waiting["limit_seconds"] == 30
    assert cluster.look(130.0).plan.parallel.data == 3


def test_a_node_that_answers_and_is_held_is_busy_and_not_lost():
    cluster = lost([1, 1, 1, 1], replan_after_seconds=30, placement_timeout_seconds=600)
    cluster.nodes[2] = replace(cluster.nodes[2], slots_free=0)
    assert cluster.look(100.0) is None
    assert cluster.look(131.0) is None
    assert cluster.of("waiting")[0]["limit_seconds"] == 600
    assert cluster.look(699.0) is None


def test_a_node_that_answers_again_is_used_again():
    cluster = lost([1, 1, 1, 1], replan_after_seconds=30)
    silent(cluster, 2)
    assert cluster.look(100.0) is None
    cluster.nodes[2] = replace(cluster.nodes[2], slots_free=1, silent=False)
    assert cluster.look(101.0).plan.parallel.data == 4


def test_patience_with_lost_nodes_counts_from_when_the_loss_was_noticed():
    cluster = lost([1, 1, 1], noticed=100.0, replan_after_seconds=30)
    assert cluster.look(115.0) is None  # ending the attempt before has taken so long
    assert cluster.look(129.9) is None
    assert cluster.look(130.0).plan.parallel.data == 3


def test_what_the_attempt_before_has_held_is_waited_for_though_patience_is_over():
    cluster = lost([1, 1, 1], noticed=100.0, replan_after_seconds=3)
    being_freed(cluster)
    assert cluster.look(115.0) is None
    freed(cluster)
    assert cluster.look(115.25).plan.parallel.data == 3


def test_slots_that_others_take_meanwhile_are_not_waited_for_for_ever():
    cluster = lost([1, 1, 1], noticed=100.0, replan_after_seconds=3)
    cluster.nodes[0] = replace(cluster.nodes[0], slots_free=0)
    assert cluster.look(115.0) is None
    assert cluster.look(116.9) is None
    assert cluster.look(117.25).plan.parallel.data == 2


def test_when_others_hold_all_that_remains_they_are_waited_for_as_busy_nodes_are():
    cluster = lost([1, 1, 1], noticed=100.0, replan_after_seconds=3, placement_timeout_seconds=60)
    being_freed(cluster)
    assert cluster.look(115.0) is None
    assert cluster.look(118.0) is None
    (waiting,) = cluster.of("waiting")
    assert (waiting["limit_seconds"], waiting["then"]) == (60, "")
    freed(cluster)
    assert cluster.look(119.0).plan.parallel.data == 3


def test_and_no_longer_than_that():
    cluster = lost([1, 1, 1], noticed=100.0, replan_after_seconds=3, placement_timeout_seconds=60)
    being_freed(cluster)
    assert cluster.look(115.0) is None
    assert cluster.look(159.0) is None
    with pytest.raises(PlacementError, match="nodes are gone, and what remains holds no plan"):
        cluster.look(160.0)


def test_a_lost_node_need_not_free_what_it_held():
    cluster = lost([1, 1, 1, 1], noticed=100.0, replan_after_seconds=3)
    silent(cluster, 2)
    assert cluster.look(104.0).plan.parallel.data == 3


def test_nodes_are_looked_at_every_second_and_at_the_moment_when_patience_ends():
    cluster = lost([1, 1, 1], replan_after_seconds=4.5)
    cluster.seen_at.clear()
    ticks = (100 + tick / 4 for tick in range(40))
    assert next(tick for tick in ticks if cluster.look(tick)) == 104.5
    assert cluster.seen_at == [100.0, 101.0, 102.0, 103.0, 104.0, 104.5]
