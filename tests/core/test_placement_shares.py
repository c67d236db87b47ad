"""Which nodes hold a plan, and the refusal with its arithmetic when none do."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import PlacementError
from orchestrator.placement.shares import choose_shares, fits_when_free
from orchestrator.placement.topology import Need, Node, ShareChoice


def nodes(*free: int, total: int | None = None) -> list[Node]:
    return [Node(f"n{i}", f"node{i}", max(total or f, f), f) for i, f in enumerate(free)]


def held(choice: ShareChoice) -> dict[str, int]:
    return {node: choice.node_ids.count(node) * choice.share_size for node in choice.node_ids}


def test_whole_free_nodes_get_one_share_each():
    choice = choose_shares(nodes(8, 8), Need(16, 8, 8))
    assert (choice.share_size, choice.node_ids) == (8, ("n0", "n1"))


def test_a_partly_busy_cluster_is_packed_by_whole_tensor_groups():
    choice = choose_shares(nodes(3, 3, 4, 4), Need(12, 2, 4))
    assert held(choice) == {"n0": 2, "n1": 2, "n2": 4, "n3": 4}
    assert choice.share_size == 2


@pytest.mark.parametrize(
    ("free", "need", "expected"),
    [
        pytest.param((8, 4, 2), Need(4, 2, 8), {"n1": 4}, id="the node that fits exactly, not the largest"),
        pytest.param((8, 8, 5), Need(12, 4, 8), {"n0": 8, "n2": 4}, id="the rest goes to the smallest that holds it"),
        pytest.param((2, 2, 2, 2), Need(4, 1, 8), {"n0": 2, "n1": 2}, id="no more nodes than needed"),
        pytest.param((8,), Need(3, 1, 8), {"n0": 3}, id="part of a node"),
        pytest.param((8, 8), Need(8, 1, 4), {"n0": 4, "n1": 4}, id="no more of a node than was declared"),
    ],
)
def test_fewest_nodes_then_tightest_fit(free, need, expected):
    assert held(choose_shares(nodes(*free), need)) == expected


def test_the_refusal_counts_groups_node_by_node():
    with pytest.raises(PlacementError) as refusal:
        choose_shares(nodes(16, 8, 7), Need(128, 8, 16))
    text = str(refusal.value)
    assert "needs 16 TP groups of 8 GPUs; 3 nodes hold 2 + 1 + 0" in text
    assert "Plan for at most 24 GPUs, or add nodes." in text


def test_the_refusal_says_when_only_the_split_over_nodes_is_in_the_way():
    with pytest.raises(PlacementError) as refusal:
        choose_shares(nodes(3, 3, 3, 3), Need(12, 2, 4))
    assert "12 GPUs are free in all, but a TP group must lie on one node: free per node 3 + 3 + 3 + 3" in str(
        refusal.value
    )


def test_the_refusal_says_when_others_hold_the_rest_now():
    with pytest.raises(PlacementError) as refusal:
        choose_shares(nodes(2, 2, total=8), Need(8, 1, 8))
    assert "Others hold the rest now" in str(refusal.value)
    assert fits_when_free(nodes(2, 2, total=8), Need(8, 1, 8))


def test_a_tensor_degree_that_no_node_can_hold_is_named_with_the_largest_that_fits():
    with pytest.raises(PlacementError, match=r"set parallel\.tensor to at most 4"):
        choose_shares(nodes(4, 4), Need(8, 8, 8))


def test_nodes_of_another_kind_are_not_counted():
    mixed = [Node("a", "a", 8, 8, kind="H100"), Node("b", "b", 8, 8, kind="L4")]
    assert choose_shares(mixed, Need(8, 8, 8, kinds=("H100",))).node_ids == ("a",)
    with pytest.raises(PlacementError, match="1 node of another kind than H100 \\(L4\\) not counted"):
        choose_shares(mixed, Need(16, 8, 8, kinds=("H100",)))


def test_an_empty_cluster_is_refused_without_arithmetic_on_nothing():
    with pytest.raises(PlacementError, match="needs 2 GPUs; no node has any"):
        choose_shares([], Need(2, 1, 8))


@st.composite
def problems(draw):
    tensor = draw(st.sampled_from([1, 2, 4, 8]))
    totals = draw(st.lists(st.integers(0, 16), max_size=12))
    inventory = [Node(f"n{i:02d}", f"n{i:02d}", total, draw(st.integers(0, total))) for i, total in enumerate(totals)]
    return inventory, Need(tensor * draw(st.integers(1, 24)), tensor, draw(st.integers(1, 16)))


@settings(max_examples=400, deadline=None)
@given(problems())
def test_any_inventory_is_packed_validly_or_refused_for_a_true_reason(problem):
    inventory, need = problem
    most = {node.node_id: min(node.slots_free, need.slots_per_node) for node in inventory}
    possible = sum(slots // need.tensor for slots in most.values()) >= need.groups
    try:
        choice = choose_shares(inventory, need)
    except PlacementError:
        assert not possible
        return
    assert possible
    assert choice.share_size % need.tensor == 0
    taken = held(choice)
    assert sum(taken.values()) == need.world_size
    assert all(slots <= most[node] for node, slots in taken.items())
    largest_first = sorted((slots // need.tensor for slots in most.values()), reverse=True)
    fewest = next(n for n in range(1, len(largest_first) + 1) if sum(largest_first[:n]) >= need.groups)
    assert len(taken) == fewest


def test_two_thousand_nodes_are_placed():
    choice = choose_shares([Node(f"n{i:04d}", "", 8, 8) for i in range(2048)], Need(16384, 8, 8))
    assert len(choice.node_ids) == 2048
