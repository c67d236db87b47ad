"""How a process ends that was a driver of Ray: with its own exit code, whatever native code would do to it at the end.

Ray keeps threads running after `ray.shutdown`, and `exit` destroys what they use before they end: once in a while a
process that had done all of its work dies of a segmentation fault (the kind of ray-project/ray issue 18857). Python's
part of an ending, `atexit` and the threads that are waited for, is kept.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys


class Leaving:
    """Make it before anything else that registers with `atexit`: its own turn is then the last."""

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._leave)

    def with_code(self, code: int) -> int:
        """The code that the process is going to end with. Without one it ends as Python ends it."""
        self._code = code
        return code

    def _leave(self) -> None:
        if self._code is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # none, broken, closed
                stream.flush()
        os._exit(self._code)
