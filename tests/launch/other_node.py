"""`python -m tests.launch.other_node HEAD NODE`: a Ray node of 8 pretended GPUs, until its standard input is closed.

As a process of its own it can be given what a machine has of its own: `elsewhere` starts it with other variables and
with folders that are empty there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_PATIENCE_SECONDS = 120.0
_OWN_MOUNTS = ("unshare", "--user", "--map-root-user", "--mount")


def can_be_elsewhere() -> bool:
    """Whether this machine lets a process have mounts of its own."""
    with contextlib.suppress(OSError):
        return subprocess.run([*_OWN_MOUNTS, "true"], capture_output=True, check=False).returncode == 0
    return False


@contextlib.contextmanager
def elsewhere(head: str, empty: Sequence[Path], variables: dict[str, str], **node: Any) -> Iterator[None]:
    """A node of the cluster at `head` that finds nothing in the folders `empty`; `node` is what Ray lets a node have.

    The folders are covered in a mount namespace, which takes root, or user namespaces.
    """
    script = " && ".join([*(f"mount -t tmpfs none {shlex.quote(str(folder))}" for folder in empty), 'exec "$@"'])
    in_it = [*_OWN_MOUNTS, "sh", "-c", script, "node"]
    known = _nodes(head)
    process = subprocess.Popen(
        [*in_it, sys.executable, "-m", __name__, head, json.dumps(node)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **variables},
        cwd=Path(__file__).parents[2],
        text=True,
    )
    try:
        _wait_for_nodes(head, known + 1, process)
        yield
    finally:
        process.communicate()


def _nodes(head: str) -> int:
    import ray

    return len(ray._raylet.GcsClient(address=head).get_all_node_info(timeout=30))


def _wait_for_nodes(head: str, number: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while _nodes(head) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the node did not appear"
        time.sleep(0.1)


def main() -> None:
    """Be the node."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    given = json.loads(sys.argv[2])
    parameters = RayParams(
        redis_address=sys.argv[1], gcs_address=sys.argv[1], min_worker_port=0, max_worker_port=0, node_manager_port=0,
        include_log_monitor=False, object_store_memory=80 * 2**20, dashboard_agent_listen_port=None, **given,
    )  # fmt: skip
    node = Node(parameters, head=False, shutdown_at_exit=True, spawn_reaper=True)
    sys.stdin.read()
    node.kill_all_processes(check_alive=False, allow_graceful=True)


if __name__ == "__main__":
    main()
