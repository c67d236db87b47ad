"""Which signals ask a run to stop, and which are left alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from orchestrator.launch.signals import stop_signals


@pytest.fixture(autouse=True)
def at_a_terminal() -> Iterator[None]:
    """Whoever runs the tests may do so under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_is_told_by_name_and_given_back_afterwards(number):
    before = signal.getsignal(number)
    told: list[str] = []
    with stop_signals(told.append):
        os.kill(os.getpid(), number)
    assert told == [number.name]
    assert signal.getsignal(number) is before


def test_under_nohup_a_closed_terminal_is_no_reason_to_stop():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    told: list[str] = []
    with stop_signals(told.append):
        os.kill(os.getpid(), signal.SIGHUP)
    assert told == []
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_closes_asks_once_however_often_it_is_said():
    told: list[str] = []
    with stop_signals(told.append):
        os.kill(os.getpid(), signal.SIGHUP)  # from the kernel
        os.kill(os.getpid(), signal.SIGHUP)  # from the shell
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
    assert told == ["SIGHUP", "SIGTERM"]


def test_handlers_that_ray_has_replaced_are_taken_back():
    told: list[str] = []
    with stop_signals(told.append) as take_back:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        take_back()
        os.kill(os.getpid(), signal.SIGTERM)
    assert told == ["SIGTERM"]


def test_outside_the_main_thread_signals_are_left_as_they_are():
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def body() -> None:
        with stop_signals(lambda name: None):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [before]
