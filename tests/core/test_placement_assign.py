"""Which rank lies on which slot, from where the shares really came to lie."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import PlacementError
from orchestrator.placement.assign import RankReport, assign_coordinates, planned_table, verify_placement
from orchestrator.placement.shares import choose_shares
from orchestrator.placement.topology import LocatedShare, Need, Node
from orchestrator.plan.run_plan import RankPlace


def table(pipeline: int, data: int, tensor: int, per_node: int) -> list[RankPlace]:
    """Mesh order pipeline > data > tensor, filled node by node: the plan's own table."""
    places = []
    for p in range(pipeline):
        for d in range(data):
            for t in range(tensor):
                rank = (p * data + d) * tensor + t
                places.append(
                    RankPlace(rank, rank // per_node, rank % per_node, data=d, pipeline=p, context=0, tensor=t)
                )
    return places


def located(choice, shuffle: random.Random | None = None) -> list[LocatedShare]:
    """Shares as supervisors would report them: consecutive devices of their node, in any order."""
    used: dict[str, int] = defaultdict(int)
    shares = []
    for number, node in enumerate(choice.node_ids):
        start = used[node]
        used[node] += choice.share_size
        shares.append(LocatedShare(number, node, node, tuple(range(start, start + choice.share_size))))
    if shuffle:
        shuffle.shuffle(shares)
    return shares


def test_the_planned_table_comes_out_when_the_nodes_are_as_planned():
    planned = table(pipeline=2, data=2, tensor=2, per_node=4)
    shares = [LocatedShare(1, "b", "b", (0, 1, 2, 3)), LocatedShare(0, "a", "a", (3, 2, 1, 0))]
    assert planned_table(assign_coordinates(planned, shares)) == tuple(planned)


def test_what_the_plan_keeps_on_one_node_stays_there_as_far_as_nodes_allow():
    planned = table(pipeline=1, data=6, tensor=2, per_node=4)
    shares = located(
        choose_shares([Node(n, n, f, f) for n, f in zip("abcd", (3, 3, 4, 4), strict=True)], Need(12, 2, 4))
    )
    placed = assign_coordinates(planned, shares)
    groups = defaultdict(set)
    for entry in placed:
        groups[entry.node_id].add(entry.data)
    assert dict(groups) == {"c": {0, 1}, "d": {2, 3}, "a": {4}, "b": {5}}


def test_a_share_that_would_split_a_tensor_group_is_refused():
    with pytest.raises(PlacementError, match=r"no multiple of parallel\.tensor=2"):
        assign_coordinates(
            table(1, 3, 2, 6), [LocatedShare(0, "a", "a", (0, 1, 2)), LocatedShare(1, "b", "b", (0, 1, 2))]
        )


def test_shares_with_too_few_slots_are_refused():
    with pytest.raises(PlacementError, match="4 ranks were planned, the shares have 2 slots"):
        assign_coordinates(table(1, 2, 2, 4), [LocatedShare(0, "a", "a", (0, 1))])


def test_reports_that_agree_with_the_table_are_no_problem():
    placed = assign_coordinates(table(1, 2, 2, 4), [LocatedShare(0, "a", "a", (0, 1, 2, 3))])
    assert verify_placement(placed, {e.rank: RankReport(e.rank, "a", e.device) for e in placed}) == ()


@pytest.mark.parametrize(
    ("rank", "report", "message"),
    [
        pytest.param(1, RankReport(1, "b", 1), "rank 1 was placed on a, but runs on node b", id="another node"),
        pytest.param(
            1, RankReport(1, "b", 1), "TP group data=0 pipeline=0 context=0 lies on 2 nodes", id="split group"
        ),
        pytest.param(1, RankReport(1, "a", 3), "given device 1, but computes on 3", id="another device"),
        pytest.param(1, RankReport(1, "a", 0), "2 ranks compute on device 0 of node a", id="one device twice"),
        pytest.param(1, None, "rank 1 has not said where it is", id="no report"),
    ],
)
def test_every_way_to_lie_elsewhere_is_named(rank, report, message):
    placed = assign_coordinates(table(1, 2, 2, 4), [LocatedShare(0, "a", "a", (0, 1, 2, 3))])
    reports = {e.rank: RankReport(e.rank, "a", e.device) for e in placed}
    if report is None:
        del reports[rank]
    else:
        reports[rank] = report
    assert any(message in problem.message for problem in verify_placement(placed, reports))


@settings(max_examples=300)
@given(
    degrees=st.tuples(st.integers(1, 4), st.integers(1, 6), st.sampled_from([1, 2, 4])),
    free=st.lists(st.integers(0, 9), min_size=1, max_size=10),
    seed=st.integers(0, 1000),
)
def test_wherever_shares_lie_every_rank_has_its_own_slot_and_no_tensor_group_is_split(degrees, free, seed):
    pipeline, data, tensor = degrees
    need = Need(pipeline * data * tensor, tensor, 8)
    try:
        choice = choose_shares([Node(f"n{i}", f"n{i}", f, f) for i, f in enumerate(free)], need)
    except PlacementError:
        return
    planned = table(pipeline, data, tensor, per_node=8)
    shares = located(choice, random.Random(seed))
    placed = assign_coordinates(planned, shares)
    assert [entry.rank for entry in placed] == list(range(need.world_size))
    assert len({(entry.node_id, entry.device) for entry in placed}) == need.world_size
    assert len({(entry.share, entry.local_rank) for entry in placed}) == need.world_size
    nodes_of = defaultdict(set)
    for entry, place in zip(placed, planned, strict=True):
        nodes_of[(entry.pipeline, entry.data)].add(entry.node_id)
        assert (entry.data, entry.pipeline, entry.tensor) == (place.data, place.pipeline, place.tensor)
    assert all(len(nodes) == 1 for nodes in nodes_of.values())
    # The order in which supervisors came up changes nothing.
    again = assign_coordinates(planned, list(reversed(shares)))
    assert [replace(e, share=0) for e in again] == [replace(e, share=0) for e in placed]
