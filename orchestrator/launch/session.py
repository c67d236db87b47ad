"""The connection to Ray: its environment, its start and its end. A quiet one: nothing of Ray's reaches the console.

With `RAY_ADDRESS` it joins that cluster; without, it starts one of its own on this machine, bound to loopback, and
ends it afterwards. Never a bare `ray.init()`, which would join any cluster that the machine remembers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import warnings
from collections.abc import Iterator
from typing import Any

from orchestrator.errors import Problem, RunError
from orchestrator.plan.run_plan import RunPlan

_ENVIRONMENT = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}
"""Set before Ray is imported; what the user has set stays."""
_LOCAL_ENVIRONMENT = {
    # A cluster of our own on one machine is not preempted, and each watcher is one more Python process to start.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # Workers that Ray starts in advance lack Ray Train's variables, so they are never used.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Ray replaces a loopback address by the machine's own, unless it is told that no other machine will join.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


_KNOCK_SECONDS = 10.0
"""How long a cluster's address may take to accept a connection."""


def cluster_address() -> str | None:
    """Address of the cluster to join; None: start one of our own."""
    return os.environ.get("RAY_ADDRESS") or None


def own_host() -> str:
    """Address under which this machine is reached by the run's supervisors."""
    if cluster_address() is None:
        return "127.0.0.1"
    return _node_address()


def _node_address() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())  # type: ignore[no-untyped-call]


def prepare_environment() -> None:
    """Set what Ray reads when it is imported; call it before that."""
    for name, value in {**_ENVIRONMENT, **(_LOCAL_ENVIRONMENT if cluster_address() is None else {})}.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def ray_session(plan: RunPlan) -> Iterator[Any]:
    """Ray, connected; yields the module. Raises `RunError` when the cluster does not answer."""
    prepare_environment()
    warnings.filterwarnings("ignore", module=r"ray(\.|$)")
    import ray

    address = cluster_address()
    with contextlib.ExitStack() as stack:
        try:
            if address is None:
                from orchestrator.launch.own_cluster import own_cluster

                address = stack.enter_context(own_cluster(_cpu_slots(plan)))
            else:
                _knock(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise RunError(_unreachable(error)) from error
        stack.callback(ray.shutdown)
        for name in ("ray", "ray.train", "ray.data"):
            logging.getLogger(name).setLevel(logging.ERROR)
        yield ray


def _knock(address: str) -> None:
    """Raise OSError or ValueError at once where nothing listens: Ray itself would try for minutes, noisily."""
    host, colon, port = address.rpartition(":")
    if colon and "/" not in host and port.isdecimal():  # `ray://` and `auto` are Ray's to judge
        if int(port) > 65535:
            raise ValueError(f"{port} is no port")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()
        except OSError:
            if host not in ("127.0.0.1", "localhost", "[::1]"):
                raise
            # Ray takes a loopback address for the machine's own, where alone it may listen.
            socket.create_connection((_node_address(), int(port)), timeout=_KNOCK_SECONDS).close()


def _cpu_slots(plan: RunPlan) -> int:
    cores = len(os.sched_getaffinity(0))
    # The declared processes of this machine are its slots, also where it has fewer cores.
    return max(cores, plan.config.cluster.gpus_per_node) if plan.config.cluster.device == "cpu" else cores


def _unreachable(error: Exception) -> Problem:
    address = cluster_address()
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if address is None:
        message = f"Ray could not be started on {socket.gethostname()}: {first_line}"
        return Problem("", message, "Check free disk and memory, and that /tmp is writable.")
    fix = (
        "Check RAY_ADDRESS, that the cluster runs the same Ray and Python versions, and, if it asks for a token, "
        "RAY_AUTH_MODE=token with RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH."
    )
    return Problem("", f"the Ray cluster at RAY_ADDRESS={address} cannot be joined: {first_line}", fix)
