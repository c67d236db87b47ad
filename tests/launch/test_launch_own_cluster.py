"""A run as a command in a terminal, on a Ray cluster of its own: quiet, stopped by Ctrl-C, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.conftest import processes_with

pytestmark = pytest.mark.ray
END_SECONDS = 60.0


class Command:
    """`tests.launch.command` in a process group of its own, as a shell starts it; every process it starts is marked."""

    def __init__(self, folder: Path, *toy: str) -> None:
        self.mark = f"MARK={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        environment = {key: text for key, text in os.environ.items() if key != "RAY_ADDRESS"} | {name: value}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.launch.command", str(folder), *toy],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def events(self) -> Iterator[dict]:
        """Events as they come; each is one line on standard output."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def left_over(self) -> list[int]:
        """Processes of the command that still live, after they had time to end."""
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            left = processes_with(self.mark)
            if not left:
                return []
            time.sleep(0.1)
        return left


def title_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").strip().decode()
    except OSError:
        return ""  # ended meanwhile


def test_ctrl_c_in_a_terminal_lets_ranks_save_and_leaves_a_clean_console_and_no_process(tmp_path):
    command = Command(tmp_path, "TOY_STEPS=100000", "TOY_STEP_SECONDS=0.02")
    interrupted = False
    for event in command.events():  # a line of Ray's own would not be JSON
        if event["kind"] == "step" and event["step"] == 3 and not interrupted:
            interrupted = True
            assert len(processes_with(command.mark)) > 6  # Ray's processes, the warm one, a keeper, two ranks
            os.killpg(command.process.pid, signal.SIGINT)  # what a terminal does: to the whole foreground group
        if event["kind"] == "outcome":
            outcome = event
    assert outcome["status"] == "stopped"
    assert outcome["problems"] == []
    assert outcome["last_step"] >= 3
    assert [name for name, _ in outcome["timings"]][:5] == ["imports", "ray", "nodes", "workers", "warm-up"]
    assert sum(seconds for _, seconds in outcome["timings"]) == pytest.approx(outcome["seconds_to_first_step"])
    assert command.process.stderr is not None
    assert command.process.stderr.read() == ""
    assert command.process.wait() == 0
    assert command.left_over() == []
    log = (tmp_path / "logs" / "rank-001.log").read_text()
    assert "rank 1 starts at step 1" in log


def test_nothing_is_left_when_the_command_itself_is_killed(tmp_path):
    command = Command(tmp_path, "TOY_STEPS=100000", "TOY_STEP_SECONDS=0.02")
    for event in command.events():
        if event["kind"] == "step":
            titles = " ".join(title_of(process) for process in processes_with(command.mark))
            assert "ray::DashboardAgent" in titles  # the mark must show in all that could be left
            command.process.kill()
            break
    command.process.wait()
    assert command.left_over() == []
