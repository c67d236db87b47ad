"""The run's own record: whole lines or none, and nothing executed is forgotten."""

from __future__ import annotations

import json
import math
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.tracking.metrics_log import MetricsLog, read_records
from orchestrator.tracking.tail import MetricsTail, Sent, after, points_of
from tests.core.run_cases import step_record


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_records(path)]


def test_a_record_is_one_line_that_reads_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(step_record(1))
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 1
    assert read_records(log.path) == [step_record(1)]


def test_what_json_cannot_write_is_text_that_float_reads_back(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "loss": math.nan, "gradient_norm": math.inf})
    record = json.loads(log.path.read_text(), parse_constant=pytest.fail)
    assert math.isnan(float(record["loss"]))
    assert float(record["gradient_norm"]) == math.inf


def test_a_torn_last_line_is_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append(step_record(1))
    with path.open("ab") as stream:
        stream.write(b'{"step": 2, "lo')
    assert steps(path) == [1]
    MetricsLog(path).append(step_record(2))
    assert steps(path) == [1, 2]


def test_a_file_that_is_nothing_but_a_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * 200_000)
    MetricsLog(path)
    assert path.read_bytes() == b""


def test_a_full_disk_keeps_lines_waiting_and_writes_them_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(step_record(1))
    with files_of_at_most(log.path.stat().st_size + 10):
        log.append(step_record(2))
        log.append(step_record(3))
        assert steps(log.path) == [1]
        assert log.path.read_bytes().endswith(b"\n"), "no torn line is left"
    log.append(step_record(4))
    assert steps(log.path) == [1, 2, 3, 4]
    assert caplog.text.count("cannot be written") == 1


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond a size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_rewind_drops_the_steps_after_and_keeps_them_elsewhere(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        log.append(step_record(step))
    assert log.rewind(3) == 2
    log.append(step_record(4, attempt=2))
    assert steps(log.path) == [1, 2, 3, 4]
    assert steps(tmp_path / "metrics.rewound.jsonl") == [4, 5]
    assert read_records(log.path)[-1]["attempt"] == 2


def test_rewind_to_the_last_step_changes_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(step_record(1))
    inode = log.path.stat().st_ino
    assert log.rewind(1) == 0
    assert log.path.stat().st_ino == inode
    assert not (tmp_path / "metrics.rewound.jsonl").exists()


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n[2]\n')
    with pytest.raises(ValueError, match="line 2 is not a JSON object"):
        read_records(path)


# Following it


def test_the_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    tail = MetricsTail(log.path)
    log.append(step_record(1))
    with log.path.open("ab") as stream:
        stream.write(b'{"step": 2')
    assert [record["step"] for record in tail.read()[0]] == [1]
    with log.path.open("ab") as stream:
        stream.write(b', "loss": 1}\n')
    assert tail.read() == ([{"step": 2, "loss": 1}], False)
    assert tail.read() == ([], False)


def test_the_tail_sees_a_rewind_and_reads_the_file_again(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    tail = MetricsTail(log.path)
    assert tail.read() == ([], False)
    for step in (1, 2, 3):
        log.append(step_record(step))
    tail.read()
    log.rewind(1)
    log.append(step_record(2, attempt=2))
    records, rewound = tail.read()
    assert rewound
    assert [(record["step"], record["attempt"]) for record in records] == [(1, 1), (2, 2)]


def test_the_tail_of_a_file_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    assert MetricsTail(tmp_path / "metrics.jsonl").read() == ([], False)


def test_points_are_the_numbers_of_a_record_and_the_loss_is_last() -> None:
    points = points_of(step_record(3), Sent())
    assert {point.key for point in points} == {
        "loss",
        "learning_rate",
        "gradient_norm",
        "tokens",
        "step_seconds",
        "tokens_per_second",
        "memory_bytes",
    }
    assert points[-1].key == "loss"
    assert {(point.step, point.timestamp_ms) for point in points} == {(3, 1_700_001_003_000)}


def test_a_step_that_was_sent_gives_no_points_but_its_late_validation_does() -> None:
    record = step_record(3, validation_loss=2.0)
    assert points_of(record, Sent(step=3, validation_step=3)) == []
    assert [point.key for point in points_of(record, Sent(step=3, validation_step=0))] == ["validation_loss"]


def test_sending_moves_both_marks_by_what_was_sent() -> None:
    points = points_of(step_record(3, validation_loss=2.0), Sent(2, 0))
    assert after(Sent(2, 0), points) == Sent(3, 3)
    assert after(Sent(2, 1), points_of(step_record(3), Sent(2, 1))) == Sent(3, 1)


def test_a_loss_that_is_not_a_number_is_sent_as_such() -> None:
    points = points_of({"step": 1, "loss": "nan", "note": "text", "ok": True, "time": 0.0}, Sent())
    assert [point.key for point in points] == ["loss"]
    assert math.isnan(points[0].value)
