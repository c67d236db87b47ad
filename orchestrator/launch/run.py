"""`launch(request, observe)`: bring a run up on Ray, hold it until it ends, leave nothing behind.

Order of the start, so that slow things overlap: the warm process begins to import torch, Ray starts beside it, then Ray
Train places the supervisors, which fork the ranks. `loop.py` is what happens after that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from orchestrator.launch.channel import Channel
from orchestrator.launch.inventory import nodes_now
from orchestrator.launch.loop import RunLoop
from orchestrator.launch.ray_attempt import RayAttempt
from orchestrator.launch.request import Attempt, LaunchOutcome, LaunchRequest
from orchestrator.launch.session import cluster_address, own_host, ray_session
from orchestrator.launch.signals import stop_signals
from orchestrator.launch.timings import Timings
from orchestrator.launch.warm import WarmProcess, preload_of
from orchestrator.placement.topology import Node
from orchestrator.plan.run_plan import RunPlan

__all__ = ["Attempt", "LaunchOutcome", "LaunchRequest", "launch"]


def launch(request: LaunchRequest, observe: Callable[[dict[str, Any]], None]) -> LaunchOutcome:
    """Run `request.plan` to its end; `observe` hears of every event in this thread.

    Events have a `kind`: `placement`, `ready`, `resumed`, `step`, `validation`, `checkpoint`, `waiting`, `restart`,
    `recovered`, `replanned`, `preemption`, `straggler`, `stopping`, `warm`; those of a rank carry its fields and
    `rank`, `attempt`. Raises `PlacementError` when the plan cannot be placed and `RunError` when Ray cannot be reached:
    nothing was started then. Failures of the run itself are in the outcome.
    """
    timings = Timings(request.command_started)
    timings.mark("imports", time.time())
    signals: list[str] = []
    channel: Channel | None = None

    def tell(name: str) -> None:
        if channel is None:
            signals.append(name)
            if len(signals) > 1:
                raise KeyboardInterrupt  # nothing runs yet that could save
        else:
            channel.put("signal", name)

    with contextlib.ExitStack() as stack:
        take_signals_back = stack.enter_context(stop_signals(tell))
        warm = _warm(request, stack)
        ray = stack.enter_context(ray_session(request.plan))
        take_signals_back()
        timings.mark("ray", time.time())
        channel = Channel(own_host())
        stack.callback(channel.close)
        for name in signals:
            channel.put("signal", name)
        sockets = {ray.get_runtime_context().get_node_id(): warm.socket_path} if warm else {}
        lines = channel

        cluster = request.plan.config.cluster

        def see(leaving: frozenset[str], doubted: frozenset[str]) -> tuple[Node, ...]:
            return nodes_now(ray, cluster.device, cluster.domain_label, leaving, doubted)

        def make_attempt(number: int, plan: RunPlan) -> RayAttempt:
            return RayAttempt(replace(request, plan=plan), ray, lines, number, sockets)

        return RunLoop(request, lines, observe, timings, see, make_attempt).run()


def _warm(request: LaunchRequest, stack: contextlib.ExitStack) -> WarmProcess | None:
    """The warm process of this machine, where ranks are sure to run on it."""
    if cluster_address() is not None:
        return None
    warm = WarmProcess(preload_of(request.engine, request.preload))
    stack.callback(warm.close)
    return warm
