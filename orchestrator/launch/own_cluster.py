"""A Ray cluster of our own on this machine, and Ray Train's view of it: only what a run needs.

`ray.init("local")` also starts a dashboard server, an autoscaler monitor and a log monitor, each a Python process of
half a second to a second of work that a run on one machine never asks for anything. The private parts of Ray used here
are pinned by `tests/launch/test_launch_ray_contract.py`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

from ray._private.node import Node
from ray._private.parameter import RayParams
from ray.train.v2._internal.execution.scaling_policy.fixed import FixedScalingPolicy

from orchestrator.launch import reaper

_OBJECT_STORE_BYTES = 80 * 2**20
"""Nothing of a run goes through the object store; this is about the smallest that Ray takes without a word."""
_KEEP_ENVIRONMENT = "SPT_NOENV"
"""Without it a Ray process that gives itself a title writes over its environment, and our reaper's mark with it."""


class _LeanHead(Node):
    """A head node without a dashboard server."""

    def start_api_server(self, **_: Any) -> None:
        return


class NodesAsTheyAre(FixedScalingPolicy):
    """A fixed number of workers, without the actor that speaks with an autoscaler: here the node is as it is.

    Ray Train's controller imports it by name, in a process of its own.
    """

    def _send_resource_request(self) -> None:
        return

    def _maybe_send_resource_request(self) -> None:
        return

    def _cancel_resource_request(self) -> None:
        return


@contextlib.contextmanager
def own_cluster(num_cpus: int) -> Iterator[str]:
    """A cluster of this machine with `num_cpus` CPU slots and the GPUs that Ray finds; yields its address, then ends
    it."""
    parameters = RayParams(
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        no_monitor=True,
        include_log_monitor=False,  # type: ignore[arg-type]  # annotated as a string, used as a truth value
    )
    mark = uuid.uuid4().hex
    with _reaper(mark):
        with _environment({reaper.MARK: mark, _KEEP_ENVIRONMENT: "1"}):
            # Ray's reaper and ours tie the processes to this one: they end with it however it ends.
            node = _LeanHead(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)
        try:
            yield node.gcs_address
        finally:
            node.kill_all_processes(check_alive=False, allow_graceful=True)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """These variables for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _reaper(mark: str) -> Iterator[None]:
    """A process that ends what carries the mark once its standard input is closed: by us, or by our death."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()  # nobody waits for it: it ends by itself within seconds
