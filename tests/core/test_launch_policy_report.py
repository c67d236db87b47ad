"""One message for many ranks, the classes of errors, the view of one generation of ranks. No Ray, no processes."""

from __future__ import annotations

import pytest

from orchestrator.errors import ConfigError
from orchestrator.launch.board import Board
from orchestrator.launch.generation import Generation, Limits
from orchestrator.launch.report import RankFailure, classify, describe, exit_words, first_cause
from orchestrator.launch.timings import Timings
from orchestrator.placement.topology import PlacedRank

GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"


def failure(rank: int, time: float, message: str, **more) -> RankFailure:
    return RankFailure(rank, "node0", time, more.pop("kind", "crash"), message, **more)


def died(rank: int, time: float) -> RankFailure:
    return failure(rank, time, exit_words(-9), source="died")


def test_the_rank_that_died_is_the_cause_even_when_its_neighbours_complained_first():
    assert first_cause([failure(0, 1.0, GLOO), died(3, 1.2), failure(1, 1.1, GLOO)]).rank == 3


def test_a_thousand_ranks_fail_as_one_line():
    failures = [died(500, 2.0), *(failure(rank, 1.0, GLOO) for rank in range(1024) if rank != 500)]
    text = describe(failures)
    assert text.startswith("rank 500 on node0: killed by SIGKILL")
    assert text.endswith("; 1023 ranks (0 to 1023) then lost the connection")
    assert "\n" not in text


def test_like_errors_are_grouped_and_others_are_named():
    text = describe(
        [failure(0, 1.0, "OSError: disk full"), failure(1, 1.1, "OSError: disk full"), failure(2, 1.2, "KeyError: 'x'")]
    )
    assert text == "ranks 0, 1 on node0: OSError: disk full; also rank 2: KeyError: 'x'"


def test_consequences_alone_still_name_the_first():
    assert first_cause([failure(1, 2.0, GLOO), failure(0, 1.0, GLOO)]).rank == 0


class OutOfMemoryError(RuntimeError):
    """Named as torch names it."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("a"), "user"),
        (ConfigError("a"), "user"),
        (FileNotFoundError("a"), "user"),
        (RuntimeError(GLOO), "crash"),
        (OSError(28, "No space left on device"), "crash"),
        (MemoryError(), "oom"),
        (OutOfMemoryError("CUDA out of memory"), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), "oom"),
        (FloatingPointError("loss is nan"), "nan"),
        (SystemExit(3), "crash"),
    ],
)
def test_exceptions_are_classed_by_whether_they_would_come_again(error, kind):
    assert classify(error) == kind


@pytest.mark.parametrize(
    ("code", "words"),
    [(-9, "killed by SIGKILL"), (-11, "killed by SIGSEGV"), (3, "exit code 3"), (0, "without finishing its work")],
)
def test_the_end_of_a_process_is_put_into_words(code, words):
    assert words in exit_words(code)


def ranks(number: int) -> tuple[PlacedRank, ...]:
    return tuple(
        PlacedRank(r, 0, r, "n", "node0", 0, r, data=r, pipeline=0, context=0, tensor=0) for r in range(number)
    )


LIMITS = Limits(start_seconds=100, step_seconds=10)


def running(number: int = 3) -> Generation:
    generation = Generation(1, ranks(number), started=0.0, way=Timings(0.0))
    generation.note_event(0, {"kind": "step", "step": 5, "time": 50.0})
    return generation


def test_a_rank_that_lags_behind_in_a_collective_is_the_one_that_hangs():
    generation = running()
    generation.note_beats(
        {0: ("stepping", 6, 12.0, False), 1: ("stepping", 5, 12.5, False), 2: ("saving", 6, 12.0, False)}, 70.0
    )
    found = generation.overdue(70.0, LIMITS)
    assert (found.rank, found.phase, found.step) == (1, "stepping", 5)
    assert "no progress for 12.5 s (fault_tolerance.step_timeout_seconds=10)" in found.message
    assert "the furthest of the 2 others: " in found.message


def test_a_stopped_process_is_named_before_all_others():
    generation = running()
    generation.note_beats(
        {0: ("stepping", 6, 13.0, False), 1: ("stepping", 6, 12.0, True), 2: ("stepping", 6, 12.5, False)}, 70.0
    )
    found = generation.overdue(70.0, LIMITS)
    assert found.rank == 1
    assert "its process is stopped" in found.message


def test_ranks_within_their_time_do_not_hang():
    generation = running()
    generation.note_beats(dict.fromkeys(range(3), ("stepping", 6, 9.0, False)), 70.0)
    assert generation.overdue(70.0, LIMITS) is None


def test_one_silent_rank_is_enough_though_others_beat():
    generation = running()
    generation.note_beats(
        {0: ("stepping", 6, 0.1, False), 1: ("stepping", 6, 11.0, False), 2: ("stepping", 6, 0.1, False)}, 70.0
    )
    assert generation.overdue(70.0, LIMITS).rank == 1


def test_until_the_first_step_the_longer_limit_holds_for_all_together():
    generation = Generation(1, ranks(2), started=0.0, way=Timings(0.0))
    generation.note_beats({0: ("building", 0, 60.0, False), 1: ("building", 0, 61.0, False)}, 99.0)
    assert generation.overdue(99.0, LIMITS) is None
    assert "start_timeout_seconds=100" in generation.overdue(101.0, LIMITS).message


def test_ranks_that_are_done_are_not_waited_for():
    generation = running(2)
    generation.note_event(1, {"kind": "done", "status": "finished"})
    generation.note_beats({0: ("stepping", 6, 1.0, False), 1: ("finishing", 6, 99.0, False)}, 170.0)
    assert generation.overdue(170.0, LIMITS) is None


def lost_its_peer(generation: Generation, rank: int) -> None:
    generation.note_event(
        rank, {"kind": "error", "class": "crash", "message": GLOO, "time": 60.0, "phase": "stepping", "step": 6}
    )


def test_consequences_wait_a_moment_for_their_cause():
    generation = running()
    lost_its_peer(generation, 0)
    assert not generation.judgeable(60.1)
    assert generation.judgeable(62.1)
    generation.note_exit({"rank": 2, "code": -9, "time": 60.2, "phase": "stepping", "step": 6})
    assert generation.judgeable(60.2)
    assert generation.failed_step == 6


def test_consequences_on_all_ranks_wait_for_nobody():
    generation = running(2)
    lost_its_peer(generation, 0)
    assert not generation.judgeable(60.1)
    lost_its_peer(generation, 1)
    assert generation.judgeable(60.1)


def test_a_beat_is_read_back_from_shared_memory(tmp_path):
    board = Board(tmp_path / "board", 2, create=True)
    board.clear()
    rank = Board(tmp_path / "board", 2)
    rank.beat(1, "saving", 2**40)
    phase, step, age = board.read(1)
    assert (phase, step) == ("saving", 2**40)
    assert 0 <= age < 60
    assert board.read(0)[:2] == ("starting", 0)


def test_the_request_to_stop_reaches_ranks_and_is_taken_back(tmp_path):
    board = Board(tmp_path / "board", 1, create=True)
    rank = Board(tmp_path / "board", 1)
    board.ask_to_stop()
    assert rank.stop_asked()
    board.clear()
    assert not rank.stop_asked()


def test_the_parts_of_the_start_add_up_to_the_first_step():
    timings = Timings(100.0)
    timings.mark("imports", 101.0)
    timings.mark("ray", 103.0)
    timings.mark("workers", 106.0)
    for phase, moment in (("rendezvous", 106.2), ("building", 107.0), ("loading", 107.5), ("stepping", 108.0)):
        timings.note(0, {"kind": "phase", "phase": phase, "time": moment})
    timings.note(1, {"kind": "phase", "phase": "stepping", "time": 999.0})
    assert timings.splits() == ()
    timings.note(0, {"kind": "step", "step": 1, "time": 110.0})
    timings.note(0, {"kind": "step", "step": 2, "time": 111.0})
    assert dict(timings.splits())["process group"] == pytest.approx(0.8)
    assert sum(seconds for _, seconds in timings.splits()) == pytest.approx(10.0)
