"""Ctrl-C and SIGTERM: told to the run's loop, acted on there. The first asks ranks to save and stop, the second ends
all."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""SIGHUP: the terminal was closed, or the connection to it was lost. It never counts as the second wish that ends a run
at once: the kernel and the shell both send one, and a service manager sends one after SIGTERM."""


@contextlib.contextmanager
def stop_signals(tell: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Send stop signals to `tell`, by name, until the block ends; yields a function that takes them back from Ray.

    Outside the main thread, where Python allows no handler, it leaves them as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    before = {number: signal.getsignal(number) for number in _STOPPING}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]  # `nohup`: the run shall outlive its terminal

    told = 0

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal told
        if number == signal.SIGHUP and told:
            return
        told += 1
        tell(signal.Signals(number).name)

    def install() -> None:
        for number in before:
            signal.signal(number, handle)

    install()
    try:
        yield install
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
