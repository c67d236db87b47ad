"""Who is slow, who is about to leave, and what is said when memory runs out. No Ray, no processes."""

from __future__ import annotations

import pytest

from orchestrator.launch.ray_attempt import NodeTrouble
from orchestrator.launch.report import RankFailure, classify, describe, first_cause, memory_words, remedy
from orchestrator.launch.stragglers import Stragglers
from orchestrator.launch.supervisor import memory_kills
from orchestrator.launch.watch import Watch
from tests.launch.plans import cpu_plan


def paces(stragglers: Stragglers, steps: range, **slow: float) -> None:
    for step in steps:
        seconds = {rank: slow.get(f"rank{rank}", 0.2) for rank in range(4)}
        stragglers.note(seconds, dict.fromkeys(range(4), step))


def test_a_rank_that_needs_much_longer_than_the_middle_one_is_named_once():
    stragglers = Stragglers()
    paces(stragglers, range(1, 12), rank2=0.9)
    (found,) = stragglers.slow()
    assert (found.rank, found.own_seconds, found.median_seconds) == (2, 0.9, 0.2)
    assert stragglers.slow() == []


def test_one_long_step_is_a_hiccup():
    stragglers = Stragglers()
    paces(stragglers, range(1, 12))
    paces(stragglers, range(12, 13), rank2=9.0)
    assert stragglers.slow() == []


def test_a_step_that_is_told_twice_counts_once():
    stragglers = Stragglers()
    for _ in range(19):
        stragglers.note({0: 0.2, 1: 0.9}, {0: 1, 1: 1})
    assert stragglers.slow() == []


def test_of_two_ranks_the_slower_one_is_named():
    stragglers = Stragglers()
    for step in range(11):
        stragglers.note({0: 0.2, 1: 0.9}, {0: step, 1: step})
    assert [found.rank for found in stragglers.slow()] == [1]


def test_small_differences_are_nobodys_business():
    stragglers = Stragglers()
    for step in range(11):
        stragglers.note({0: 0.001, 1: 0.004}, {0: step, 1: step})
    assert stragglers.slow() == []


def test_a_rank_that_recovers_and_becomes_slow_again_is_named_again():
    stragglers = Stragglers()
    paces(stragglers, range(1, 12), rank2=0.9)
    assert stragglers.slow()
    paces(stragglers, range(12, 23))
    assert stragglers.slow() == []
    paces(stragglers, range(23, 34), rank2=0.9)
    assert [found.rank for found in stragglers.slow()] == [2]


def test_the_cluster_is_asked_about_nodes_every_two_seconds():
    watch = Watch()
    asked = []

    def ask() -> NodeTrouble:
        asked.append(1)
        return NodeTrouble()

    for now in (0.0, 0.2, 1.9, 2.0, 2.2, 4.1):
        watch.trouble(now, ask)
    assert len(asked) == 3


def test_a_node_that_leaves_is_news_once():
    watch = Watch()
    assert watch.note_leaving({"a": None}) == {"a"}
    assert watch.note_leaving({"a": 5.0, "b": None}) == {"b"}
    assert watch.leaving == {"a", "b"}


EVIDENCE = {
    "kind": "out_of_memory",
    "categories": {"parameters": 2**30, "activations": 7 * 2**30},
    "planned": {"parameters": 2**30, "activations": 3 * 2**30},
    "worst_category": "activations",
    "snapshot": "/run/memory/rank-000.pickle",
}


def out_of_memory(evidence=EVIDENCE) -> RankFailure:
    return RankFailure(0, "node0", 1.0, "oom", "OutOfMemoryError: no room", step=3, evidence=evidence)


def test_the_category_that_exceeded_the_plan_is_named_with_both_figures_and_the_snapshot():
    words = memory_words(out_of_memory())
    assert words == ("activations took 7.00 GiB, planned 3.00 GiB; the memory snapshot is /run/memory/rank-000.pickle")


def test_out_of_memory_without_measurements_still_names_what_to_run_next():
    from orchestrator import load_config, make_plan

    plan = make_plan(load_config(["+experiment=llama7b_zero2"]))
    text = remedy("oom", [out_of_memory(None)], plan, "/run/logs/")
    assert text.startswith("The next plan that fits: parallel.")
    assert text.endswith("The ranks' output is in /run/logs/.")


def test_other_failures_point_to_the_logs_alone():
    assert remedy("crash", [], cpu_plan(), "/run/logs/") == "The ranks' output is in /run/logs/."


class NetworkError(RuntimeError):
    failure_kind = "network"


def test_an_error_that_knows_its_class_keeps_it():
    assert classify(NetworkError("no way")) == "network"


def test_ranks_that_reach_nobody_are_consequences_of_the_one_that_died():
    lonely = RankFailure(0, "node0", 1.0, "network", "an all-reduce was not done")
    died = RankFailure(1, "node0", 2.0, "crash", "killed by SIGKILL", source="died")
    assert first_cause([lonely, died]) is died
    assert first_cause([lonely]) is lonely
    assert describe([lonely, died]).endswith("rank 0 then lost the connection")


@pytest.mark.skipif("not __import__('os').path.exists('/proc/vmstat')")
def test_the_kernels_count_of_processes_killed_for_memory_is_read():
    assert memory_kills() >= 0
