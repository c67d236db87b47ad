"""The driver's side of the lines to the supervisors: one queue of everything that happens, and `send`.

Threads accept and read; the run's loop alone takes from the queue, so that nothing else here needs a lock. Signals and
the end of Ray's attempt are put into the same queue, which a signal handler may do (`SimpleQueue.put` is re-entrant).
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import threading
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that the run's loop must look at."""

    source: Literal["supervisor", "gone", "signal", "attempt"]
    """`supervisor`: a message; `gone`: a supervisor's line broke; `signal`: one came; `attempt`: Ray Train's fit
    ended."""
    line: int
    """Number of the supervisor's line; -1 for the other sources."""
    body: Any


class Channel:
    """Listens for supervisors; bound to one address of this machine and closed to whoever lacks the key."""

    def __init__(self, host: str) -> None:
        self.key = secrets.token_bytes(32)
        self._listener = Listener((host, 0), backlog=1024)
        self.address: tuple[str, int] = (host, self._listener.address[1])
        self._queue: queue.SimpleQueue[Happening] = queue.SimpleQueue()
        self._lines: dict[int, Connection] = {}
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name="channel-accept", daemon=True)
        self._acceptor.start()

    def put(self, source: Literal["signal", "attempt"], body: Any) -> None:
        """Add something that did not come from a supervisor."""
        self._queue.put(Happening(source, -1, body))

    def next(self, timeout_seconds: float) -> Happening | None:
        """What happened next; None when nothing did in time."""
        try:
            return self._queue.get(timeout=timeout_seconds)
        except queue.Empty:
            return None

    def send(self, line: int, message: dict[str, Any]) -> None:
        """To one supervisor. One that is gone is reported by its reader, not here."""
        with contextlib.suppress(OSError, KeyError):
            self._lines[line].send(message)

    def close(self) -> None:
        """End all lines; supervisors that still live end their ranks."""
        self._closed = True
        with contextlib.suppress(OSError):
            socket.create_connection(self.address).close()  # wakes `_accept`, which then sees that it is over
        self._acceptor.join()
        self._listener.close()
        for connection in list(self._lines.values()):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as line:
                # Closing alone does not end a line that another thread is reading; its reader closes it.
                line.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        number = 0
        while not self._closed:
            try:
                connection = self._listener.accept()
            except OSError:
                continue  # the caller was gone before it was let in, or `close` ends the loop
            if self._closed:
                connection.close()
                return
            name = f"channel-{number}"
            threading.Thread(target=self._read, args=(number, connection), name=name, daemon=True).start()
            number += 1

    def _read(self, number: int, connection: Connection) -> None:
        # The keys are compared here and not in `accept`, so that a stranger who says nothing keeps nobody waiting.
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
        except (OSError, EOFError, AuthenticationError):
            connection.close()
            return
        self._lines[number] = connection
        try:
            while True:
                self._queue.put(Happening("supervisor", number, connection.recv()))
        except (OSError, EOFError):
            self._lines.pop(number, None)
            connection.close()
            self._queue.put(Happening("gone", number, None))
