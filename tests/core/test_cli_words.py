"""What is printed: problems, progress, the placement table, the closing lines."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from orchestrator.cli.placement_table import placement_lines
from orchestrator.cli.progress import Pace, PlainProgress, event_lines, make_progress, span, step_line
from orchestrator.cli.progress_bar import ProgressBar
from orchestrator.cli.show import problems_text
from orchestrator.errors import Problem


def record(step: int, *, attempt: int = 1, seconds: float = 0.5, time: float = 0.0, **more: Any) -> dict[str, Any]:
    """A step as rank 0 reports it: 1,000 tokens."""
    return {"kind": "step", "step": step, "attempt": attempt, "loss": 2.5, "tokens": 1000, "step_seconds": seconds,
            "time": time, **more}  # fmt: skip


def place(rank: int, node: int, device: int, **axes: int) -> dict[str, Any]:
    return {"rank": rank, "node_id": f"id{node}", "node_name": f"host{node}", "device": device,
            "data": 0, "pipeline": 0, "context": 0, "tensor": 0, **axes}  # fmt: skip


def test_problems_are_numbered_wrapped_and_say_what_to_change() -> None:
    text = problems_text([Problem("a.b", "It is wrong " * 5 + "indeed.", "Change it."), Problem("", "No key.", "")], 40)
    assert text.splitlines() == [
        "2 problems; nothing was started.",
        "1. a.b: It is wrong It is wrong It is",
        "   wrong It is wrong It is wrong indeed.",
        "   -> Change it.",
        "2. No key.",
    ]


def test_a_command_in_a_remedy_stays_in_one_piece() -> None:
    command = "python -m orchestrator plan " + "+experiment=llama7b_zero2 " * 4
    lines = problems_text([Problem("a", "b.", f"See it: {command}")], 40).splitlines()
    assert lines[-2:] == ["   -> See it:", f"      {command}"]


def test_pace_leaves_out_the_first_step_of_every_attempt() -> None:
    pace = Pace(steps=10)
    pace.add(record(1, seconds=100))
    assert pace.tokens_per_second is None
    assert pace.remaining_seconds(1) is None
    pace.add(record(2, seconds=0.5))
    pace.add(record(3, attempt=2, seconds=100))
    pace.add(record(4, attempt=2, seconds=1.5))
    assert pace.tokens_per_second == pytest.approx(1000)
    assert pace.remaining_seconds(4) == pytest.approx(6)


def test_pace_follows_the_latest_steps() -> None:
    pace = Pace(steps=1000)
    for step in range(1, 200):
        pace.add(record(step, seconds=1 if step < 100 else 2))
    assert pace.tokens_per_second == pytest.approx(500)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.34, "0.3 s"), (12.4, "12 s"), (60, "1 min"), (200, "3 min 20 s"), (18720, "5 h 12 min"), (273600, "3 d 4 h")],
)
def test_spans_are_said_as_a_person_would(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_a_step_line_has_step_loss_rate_and_remaining_time() -> None:
    pace = Pace(steps=200)
    pace.add(record(1))
    assert step_line(record(1), 200, pace) == "step   1/200  loss 2.5000"
    pace.add(record(2))
    assert step_line(record(2), 200, pace) == "step   2/200  loss 2.5000  2,000 tokens/s  1 min 39 s left"
    assert step_line(record(200, skipped=True), 200, pace).endswith("2,000 tokens/s  not finite: skipped")


EVENTS = [
    ({"kind": "resumed", "step": 0, "checkpoint": None}, ()),
    ({"kind": "resumed", "step": 7, "checkpoint": "/r/step-7"}, ("continued after step 7 from /r/step-7",)),
    ({"kind": "validation", "step": 5, "validation_loss": 1.23456}, ("step 5: validation loss 1.2346 nats a token",)),
    ({"kind": "checkpoint", "step": 5, "path": "/r/c/step-5", "error": None}, ("step 5: saved step-5",)),
    (
        {"kind": "checkpoint", "step": 5, "path": None, "error": "disk full"},
        ("step 5: the checkpoint could not be written: disk full; training goes on",),
    ),
    (
        {
            "kind": "restart",
            "what": "ranks",
            "message": "rank 1 on host: killed by SIGKILL",
            "budget": "restart 1 of 3",
        },
        ("rank 1 on host: killed by SIGKILL; the ranks start again in place (restart 1 of 3)",),
    ),
    ({"kind": "recovered", "seconds": 2.2}, ("recovered: first step 2 s after the failure",)),
    (
        {"kind": "waiting", "reason": "4 GPUs are busy", "limit_seconds": 60.0},
        ("waiting for at most 60 s: 4 GPUs are busy",),
    ),
    (
        {
            "kind": "replanned",
            "reason": "needs 4 GPUs; 2 nodes hold 2 + 1.",
            "changes": ["parallel.data 4 -> 2"],
            "idle": {"host2": 1},
            "world_size": 2,
        },
        (
            "planned anew for 2 ranks, same global batch: parallel.data 4 -> 2; idle: 1 on host2 "
            "(needs 4 GPUs; 2 nodes hold 2 + 1)",
        ),
    ),
    (
        {"kind": "stopping", "signal": "SIGINT", "grace_seconds": 30.0},
        ("SIGINT: saving and stopping, within 30 s; a second one ends it at once",),
    ),
    (
        {"kind": "stopping", "signal": "SIGINT", "grace_seconds": None},
        ("SIGINT: ending what was started; no rank has anything to save",),
    ),
    (
        {"kind": "warning", "message": "passed over a damaged checkpoint"},
        ("warning: passed over a damaged checkpoint",),
    ),
    ({"kind": "ready", "ranks": 2}, ()),
    ({"kind": "something new"}, ()),
]


@pytest.mark.parametrize(("event", "lines"), EVENTS, ids=[f"{row[0]['kind']}-{i}" for i, row in enumerate(EVENTS)])
def test_events_are_said_in_one_line(event: dict[str, Any], lines: tuple[str, ...]) -> None:
    assert event_lines(event) == lines


def test_plain_lines_are_a_step_every_few_seconds_and_the_last_one() -> None:
    stream = io.StringIO()
    with PlainProgress(100, stream) as progress:
        for step in range(1, 101):
            progress.observe(record(step, time=step / 2))
    steps = [int(line.split()[1].partition("/")[0]) for line in stream.getvalue().splitlines()]
    assert steps == [1, *range(11, 100, 10), 100]


def test_the_placement_is_shown_once_and_again_when_it_changes() -> None:
    stream = io.StringIO()
    here, there = [place(0, 0, 0)], [place(0, 1, 0)]
    with PlainProgress(1, stream) as progress:
        for table in (here, here, there):
            progress.observe({"kind": "placement", "table": table})
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["node", "host0", "node", "host1"]


def test_a_file_gets_plain_lines_and_no_control_characters() -> None:
    stream = io.StringIO()
    with make_progress(2, stream) as progress:
        progress.observe(record(1))
    assert "\x1b" not in stream.getvalue()


def test_the_bar_shows_step_loss_rate_and_remaining_time() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120)
    with ProgressBar(200, console) as bar:
        bar.observe(record(1))
        bar.observe(record(2))
        bar.observe({"kind": "validation", "step": 2, "validation_loss": 1.5})
    shown = stream.getvalue()
    assert "step 2/200" in shown
    assert "loss 2.5000  2,000 tokens/s  1 min 39 s left" in shown
    assert "step 2: validation loss 1.5000" in shown


def test_a_small_world_has_a_line_a_rank() -> None:
    table = [place(1, 0, 1, data=1), place(0, 0, 0)]
    assert placement_lines(table) == (
        "  rank   node  device  data",
        "     0  host0       0     0",
        "     1  host0       1     1",
    )


def test_a_larger_world_has_a_line_a_node() -> None:
    table = [place(rank, rank // 8, rank % 8, data=rank // 8, tensor=rank % 8) for rank in range(32)]
    assert placement_lines(table) == (
        "   rank   node  device  data  tensor",
        "    0-7  host0     0-7     0     0-7",
        "   8-15  host1     0-7     1     0-7",
        "  16-23  host2     0-7     2     0-7",
        "  24-31  host3     0-7     3     0-7",
    )


def test_a_very_large_world_shows_its_ends() -> None:
    lines = placement_lines([place(rank, rank // 8, rank % 8, data=rank) for rank in range(16384)])
    assert len(lines) == 12
    assert "2038 more" in lines[9]
    assert lines[-1].split()[0] == "16376-16383"
