"""The connection to Ray: its environment, its start and its end. A quiet one: nothing of Ray's reaches the console.

With `RAY_ADDRESS` it joins that cluster; without, it starts one of its own on this machine, bound to loopback, and
ends it afterwards. Never a bare `ray.init()`, which would join any cluster that the machine remembers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import warnings
from collections.abc import Iterator
from typing import Any

from orchestrator.errors import Problem, RunError
from orchestrator.launch.knock import knock
from orchestrator.plan.run_plan import RunPlan

_ENVIRONMENT = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # Notices are ours to see (`watch.py`): Ray Train's watcher looks every five seconds and waits for the deadline.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
}
"""Set before Ray is imported; what the user has set stays."""
_LOCAL_ENVIRONMENT = {
    # Ray would end a supervisor when memory is short; the kernel ends the rank that takes it, and that can be named.
    "RAY_memory_monitor_refresh_ms": "0",
    # Workers that Ray starts in advance lack Ray Train's variables, so they are never used.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Ray replaces a loopback address by the machine's own, unless it is told that no other machine will join.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


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
def ray_session(plan: RunPlan | None) -> Iterator[Any]:
    """Ray, connected; yields the module. Raises `RunError` when the cluster does not answer.

    Without `plan` a cluster must be named: there is nothing to start one for.
    """
    prepare_environment()
    warnings.filterwarnings("ignore", module=r"ray(\.|$)")
    address = cluster_address()
    if address is not None:
        knock(address)
    import ray

    with contextlib.ExitStack() as stack:
        try:
            if address is None:
                assert plan is not None, "a cluster of our own is started for a plan"
                from orchestrator.launch.own_cluster import own_cluster

                address = stack.enter_context(own_cluster(_cpu_slots(plan)))
            else:
                _check_this_machine(address)
            stack.callback(ray.shutdown)  # also of a start that fails half-way
            _keep_cluster_errors_off_the_console()
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise RunError(_unreachable(error)) from error
        for name in ("ray", "ray.train", "ray.data"):
            logging.getLogger(name).setLevel(logging.ERROR)
        yield ray


def _keep_cluster_errors_off_the_console() -> None:
    """What nodes tell every driver (a worker of ours died, the autoscaler's plans) Ray prints on stdout, whatever
    `log_to_driver` says. What concerns the run is told by the run; the words stay in Ray's own logs."""
    from ray._private import worker

    worker.print_to_stdstream = lambda *_, **__: None


def _cpu_slots(plan: RunPlan) -> int:
    cores = len(os.sched_getaffinity(0))
    # The declared processes of this machine are its slots, also where it has fewer cores.
    return max(cores, plan.config.cluster.gpus_per_node) if plan.config.cluster.device == "cpu" else cores


def _check_this_machine(address: str) -> None:
    """Raise `RunError` on a machine without a Ray node: Ray would wait a minute for one to appear."""
    from ray._private.services import find_node_ids

    if address != "local" and not find_node_ids():  # type: ignore[no-untyped-call]
        raise RunError(
            Problem(
                "",
                f"{socket.gethostname()} is no node of the Ray cluster at RAY_ADDRESS={address}, and a training is "
                "driven from one of its nodes.",
                "Run it on a node, or send it there as a job: python -m orchestrator submit",
            )
        )


def _unreachable(error: Exception) -> Problem:
    address = cluster_address()
    if address is None:
        message = f"Ray could not be started on {socket.gethostname()}: {_first_line(error)}"
        return Problem("", message, "Check free disk and memory, and that /tmp is writable.")
    where = f"the Ray cluster at RAY_ADDRESS={address} cannot be joined"
    versions = re.findall(r"(Ray|Python): ([\w.+]+)", str(error))
    if "Version mismatch" in str(error) and len(versions) == 4:
        theirs, ours = (
            " and ".join(f"{name} {version}" for name, version in pair) for pair in (versions[:2], versions[2:])
        )
        fix = "Use one environment on all machines: the same image, or `pip install -c infra/constraints.txt` on each."
        return Problem("", f"{where}: it runs {theirs}, this command {ours}.", fix)
    return Problem("", f"{where}: {_first_line(error)}", "Look at `ray status` on its head and at Ray's logs there.")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
