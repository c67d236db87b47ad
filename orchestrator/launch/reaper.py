"""`python reaper.py MARK`: ends what is left of a Ray cluster of our own when its command is gone, however it went.

Ray's own reaper ends the process group of the command, but a raylet's two agents have groups of their own; when the
cluster's store dies in the same moment, they go on trying to report to it for minutes. Processes are known by a
variable that the cluster was started with. Run as a file: imports nothing but the standard library.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

MARK = "ORCHESTRATOR_CLUSTER"
"""Variable that every process of the cluster inherits."""
_GRACE_SECONDS = 2.0
"""Time in which everything ends by itself when the command ended in order."""
_LIMIT_SECONDS = 10.0
"""Time over which new processes are looked for: one that is just being started does not show yet."""


def processes_of(mark: str) -> list[int]:
    """Processes that were started with this mark, in any state but dead."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended meanwhile, or is not ours
    return found


def reap(mark: str) -> None:
    """Wait for the command to close its end of our standard input, then end all that carries the mark."""
    sys.stdin.buffer.read()
    closed = time.monotonic()
    quiet_since = None
    while time.monotonic() - closed < _LIMIT_SECONDS:
        found = processes_of(mark)
        if found and time.monotonic() - closed > _GRACE_SECONDS:
            for process in found:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        quiet_since = None if found else quiet_since or time.monotonic()
        if quiet_since is not None and time.monotonic() - quiet_since > 1.0:
            return
        time.sleep(0.1)


if __name__ == "__main__":
    reap(sys.argv[1])
