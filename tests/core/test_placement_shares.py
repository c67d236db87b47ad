"""Which nodes hold a plan, and the refusal with its arithmetic when none do."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import load_config, make_plan
from orchestrator.errors import PlacementError
from orchestrator.placement.assign import assign_coordinates
from orchestrator.placement.shares import choose_shares, fits_when_free
from orchestrator.placement.topology import LocatedShare, Need, Node, ShareChoice, same_kind


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


KINDS = ("", "A100", "H100")
DOMAINS = ("", "rack-a", "rack-b", "rack-c")


@st.composite
def problems(draw, most_nodes=12, domains=DOMAINS):
    tensor = draw(st.sampled_from([1, 2, 4, 8]))
    totals = draw(st.lists(st.integers(0, 16), max_size=most_nodes))
    inventory = [
        Node(
            f"n{i:02d}",
            f"n{i:02d}",
            total,
            draw(st.integers(0, total)),
            kind=draw(st.sampled_from(KINDS)),
            domain=draw(st.sampled_from(domains)),
            labels=draw(st.sampled_from([{}, {"pool": "train"}])),
            leaving=draw(st.booleans()) and draw(st.booleans()),
            silent=draw(st.booleans()) and draw(st.booleans()),
        )
        for i, total in enumerate(totals)
    ]
    need = Need(
        tensor * draw(st.integers(1, 24)),
        tensor,
        draw(st.integers(1, 16)),
        kinds=draw(st.sampled_from([(), ("H100-80GB",)])),
        labels=draw(st.sampled_from([{}, {}, {"pool": "train"}])),
    )
    return inventory, need


def offers_of(inventory: list[Node], need: Need) -> dict[str, int]:
    """Groups that each node can hold, worked out from the words of the rule alone."""
    found = {}
    for node in inventory:
        there = not node.leaving and not node.silent
        allowed = there and (not need.labels or node.labels.get("pool") == "train")
        if need.kinds and node.kind == "A100":
            allowed = False
        groups = min(node.slots_free, need.slots_per_node) // need.tensor
        if allowed and groups:
            found[node.node_id] = groups
    return found


@settings(max_examples=1000)
@given(problems())
def test_any_inventory_is_packed_validly_or_refused_for_a_true_reason(problem):
    inventory, need = problem
    offers = offers_of(inventory, need)
    try:
        choice = choose_shares(inventory, need)
    except PlacementError as error:
        assert sum(offers.values()) < need.groups
        when_free = [replace(node, slots_free=node.slots_total) for node in inventory]
        waiting_helps = sum(offers_of(when_free, need).values()) >= need.groups
        assert ("Others hold the rest now" in str(error)) == waiting_helps
        return
    assert sum(offers.values()) >= need.groups
    assert choice.share_size % need.tensor == 0
    taken = held(choice)
    assert sum(taken.values()) == need.world_size
    assert all(slots <= offers.get(node, 0) * need.tensor for node, slots in taken.items())


@settings(max_examples=500)
@given(problems(most_nodes=7))
def test_small_inventories_are_packed_as_well_as_by_trying_every_set_of_nodes(problem):
    """Fewest domains; inside one domain fewest nodes, then the least left over."""
    inventory, need = problem
    offers = offers_of(inventory, need)
    if sum(offers.values()) < need.groups:
        return
    domain = {node.node_id: node.domain for node in inventory}

    def cost(nodes) -> tuple[int, int, int]:
        return len({domain[n] for n in nodes}), len(nodes), sum(offers[n] for n in nodes) - need.groups

    sets = [nodes for size in range(1, len(offers) + 1) for nodes in itertools.combinations(offers, size)]
    best = min(cost(nodes) for nodes in sets if sum(offers[n] for n in nodes) >= need.groups)
    found = cost(tuple(dict.fromkeys(choose_shares(inventory, need).node_ids)))
    assert found[0] == best[0]
    if best[0] == 1:
        assert found == best


@settings(max_examples=500)
@given(problems(most_nodes=9, domains=("",)))
def test_without_domains_the_packing_is_the_best_there_is(problem):
    inventory, need = problem
    offers = offers_of(inventory, need)
    if sum(offers.values()) < need.groups:
        return
    taken = held(choose_shares(inventory, need))
    sets = [nodes for size in range(1, len(offers) + 1) for nodes in itertools.combinations(offers.values(), size)]
    best = min((len(nodes), sum(nodes)) for nodes in sets if sum(nodes) >= need.groups)
    assert (len(taken), sum(offers[node] for node in taken)) == best


def test_a_run_lies_in_one_rack_where_one_holds_it_though_fewer_nodes_of_two_would():
    racks = [Node("a0", "a0", 8, 8, domain="a"), Node("b0", "b0", 8, 8, domain="b")]
    racks += [Node(f"c{i}", f"c{i}", 8, 4, domain="c") for i in range(4)]
    assert set(choose_shares(racks, Need(16, 4, 8)).node_ids) == {"c0", "c1", "c2", "c3"}


def test_nodes_without_an_asked_label_or_about_to_leave_are_not_counted_and_it_is_said():
    inventory = [
        Node("a", "a", 8, 8, labels={"pool": "train"}),
        Node("b", "b", 8, 8, labels={"pool": "serve"}),
        Node("c", "c", 8, 8, labels={"pool": "train"}, leaving=True),
    ]
    with pytest.raises(PlacementError) as refusal:
        choose_shares(inventory, Need(16, 8, 8, labels={"pool": "train"}))
    assert "1 node about to be taken away not counted" in str(refusal.value)
    assert "1 node without the label pool=train not counted" in str(refusal.value)


def test_nodes_that_do_not_answer_are_lost_though_they_count_as_held_and_waiting_for_them_is_not_advised():
    inventory = [*nodes(8), Node("b", "b", 8, 0, silent=True), Node("c", "c", 8, 0, silent=True, leaving=True)]
    need = Need(16, 8, 8)
    with pytest.raises(PlacementError) as refusal:
        choose_shares(inventory, need)
    assert "needs 2 TP groups of 8 GPUs; 1 node holds 1; 2 nodes that do not answer not counted." in str(refusal.value)
    assert "about to be taken away" not in str(refusal.value)
    assert "Others hold the rest now" not in str(refusal.value)
    assert not fits_when_free(inventory, need)


@pytest.mark.parametrize(
    ("asked", "reported", "same"),
    [
        ("A100-80GB", "A100", True),
        ("A100-80GB", "A100-80G", True),
        ("A100-80GB", "A100-40G", False),
        ("A100-80GB", "H100", False),
        ("MI300X", "AMD-Instinct-MI300X-OAM", True),
        ("L4", "L40S", False),
        ("A10", "A100", False),
        ("RTX4090", "GeForce-RTX-4090", True),
        ("H200-141GB", "H200", True),
    ],
)
def test_kinds_of_gpu_are_compared_word_by_word(asked, reported, same):
    assert same_kind(asked, reported) == same


def test_sixteen_thousand_ranks_on_two_thousand_partly_busy_nodes_are_placed_whole():
    inventory = [Node(f"n{i:04d}", f"n{i:04d}", 8, 8 if i % 7 else 4, domain=f"rack{i // 32}") for i in range(2400)]
    need = Need(16384, 8, 8)
    choice = choose_shares(inventory, need)
    shares = [LocatedShare(i, node, node, tuple(range(choice.share_size))) for i, node in enumerate(choice.node_ids)]
    config = load_config(["+experiment=llama3_405b"])
    placed = assign_coordinates(make_plan(config).ranks, shares_on_devices(shares))
    nodes_of_group = defaultdict(set)
    for entry in placed:
        nodes_of_group[(entry.pipeline, entry.data)].add(entry.node_id)
    assert len(placed) == 16384
    assert all(len(nodes) == 1 for nodes in nodes_of_group.values())


def shares_on_devices(shares: list[LocatedShare]) -> list[LocatedShare]:
    """Consecutive devices of their node, as supervisors report them."""
    used: dict[str, int] = defaultdict(int)
    found = []
    for share in shares:
        first = used[share.node_id]
        used[share.node_id] += len(share.devices)
        found.append(replace(share, devices=tuple(range(first, first + len(share.devices)))))
    return found


def test_two_thousand_nodes_are_placed():
    choice = choose_shares([Node(f"n{i:04d}", "", 8, 8) for i in range(2048)], Need(16384, 8, 8))
    assert len(choice.node_ids) == 2048
