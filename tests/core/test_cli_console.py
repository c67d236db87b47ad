"""A console that outlives its reader: a closed pipe and a full disk are met for real, through descriptors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from orchestrator.cli.console import outliving_console


def test_what_is_printed_arrives_until_the_reader_leaves_and_nothing_fails_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        with outliving_console() as console:
            print("step 1", flush=True)
            assert os.read(read, 100) == b"step 1\n"
            os.close(read)
            for step in range(2, 10):
                print(f"step {step}", flush=True)
            print("a problem", file=sys.stderr, flush=True)
            os.write(sys.stdout.fileno(), b"whoever else writes there is not broken either")
            assert console.no_room is None  # the reader wanted no more: nothing is missing


def test_a_full_disk_drops_lines_and_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with outliving_console() as console:
            print("a result", flush=True)
            assert console.no_room is not None
            assert console.no_room.strerror == "No space left on device"


def test_streams_that_were_closed_before_can_be_written_and_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with outliving_console():
        print("nobody reads this", flush=True)
        print("nor this", file=sys.stderr, flush=True)
    assert (sys.stdout, sys.stderr) == (None, None)


def test_a_terminal_is_still_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    leader, follower = os.openpty()
    with os.fdopen(follower, "w", encoding="latin-1") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        with outliving_console():
            assert (sys.stdout.isatty(), sys.stdout.fileno(), sys.stdout.encoding) == (True, follower, "latin-1")
            os.close(leader)  # its window is closed: writing fails with EIO from now on
            print("step 1", flush=True)
