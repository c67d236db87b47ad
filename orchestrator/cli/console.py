"""A console that a command outlives: how a training, a proof or a saved file ends is not decided by who reads along.

`| head`, a `tee` that dies, a terminal that is closed and a full disk below a log end the reading, never the work: it
goes on unread, with its own exit code. What could not be written for want of room is remembered, because a result that
was printed in part is none.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class _Outliving(io.FileIO):
    """A descriptor whose writes never fail."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.no_room: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write, or drop what nobody will read. Where room is wanting, later lines may find it again."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in NO_ROOM:
                self.no_room = self.no_room or error
            else:  # the reader is gone; whatever else writes into this descriptor must not fail either
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.fileno())
                os.close(nowhere)
            return memoryview(data).nbytes


class Console:
    """What became of the output."""

    def __init__(self) -> None:
        self._output: _Outliving | None = None

    @property
    def no_room(self) -> OSError | None:
        """Why some of stdout is missing from where it was written to; None: nothing is, or its reader wanted no more.

        Flush first.
        """
        return None if self._output is None else self._output.no_room


@contextlib.contextmanager
def outliving_console() -> Iterator[Console]:
    """Within the block, stdout and stderr can be written whatever becomes of them, also when they were closed."""
    console = Console()
    before = sys.stdout, sys.stderr
    sys.stdout, console._output = _outliving(sys.stdout)
    sys.stderr, _ = _outliving(sys.stderr)
    try:
        yield console
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def _outliving(stream: TextIO | None) -> tuple[TextIO, _Outliving | None]:
    if stream is None:  # closed by the caller (`>&-`)
        return Path(os.devnull).open("w", encoding="utf-8"), None
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # memory, which does not go away
        return stream, None
    with contextlib.suppress(OSError):
        stream.flush()
    raw = _Outliving(descriptor)
    # Lines at once on a terminal and on stderr, as Python has it.
    by_line = getattr(stream, "line_buffering", False)
    text = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=by_line)
    return text, raw
