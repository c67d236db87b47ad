"""One attempt on Ray: nodes chosen, supervisors held by Ray Train's `fit`, ranks assigned to where the shares came to
lie.

`loop.py` decides when to begin, start, kill and end; this file carries it out and knows which line is which share.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.errors import Problem
from orchestrator.launch.channel import Channel
from orchestrator.launch.inventory import bundle_nodes, draining_nodes, living_nodes
from orchestrator.launch.request import LaunchRequest
from orchestrator.launch.session import cluster_address
from orchestrator.launch.supervisor import SupervisorOrder
from orchestrator.launch.trainer import start_attempt, take_back
from orchestrator.placement.assign import RankReport, assign_coordinates
from orchestrator.placement.shares import choose_shares
from orchestrator.placement.topology import LocatedShare, Node, PlacedRank, ShareChoice, need_of
from orchestrator.plan.rank_task import RankTask

_PASSED_ON = ("NCCL_", "GLOO_", "TORCH_", "CUDA_LAUNCH_BLOCKING", "XDG_CACHE_HOME", "AWS_")
"""Variables of the driver that reach every rank, on every node; `AWS_` so that all read and write one object store."""
_END_SECONDS = 10.0
"""Time that Ray Train has to end an attempt whose supervisors have returned; it gives a dead worker five seconds."""
_TAKEN_SECONDS = 5.0
"""Time that it has after its nodes were taken from it."""


@dataclass(frozen=True, slots=True)
class NodeTrouble:
    """What the cluster says of the nodes of an attempt."""

    dead: frozenset[str] = frozenset()
    leaving: dict[str, float | None] = field(default_factory=dict)
    """Node -> `time.time()` at which it goes; None: not said."""


class RayAttempt:
    """Holds the supervisors of one `fit`."""

    def __init__(
        self,
        request: LaunchRequest,
        ray: Any,
        channel: Channel,
        number: int,
        warm_sockets: dict[str, str],
    ) -> None:
        """`request.plan` is the plan of this attempt."""
        self._request = request
        self._ray = ray
        self._channel = channel
        self._number = number
        self._warm_sockets = warm_sockets
        self._choice: ShareChoice | None = None
        self._domains: dict[str, str] = {}
        self._thread: threading.Thread | None = None
        self._facts: dict[int, dict[str, Any]] = {}
        self._cleared: set[int] = set()

    @property
    def held(self) -> dict[str, int]:
        """Slots of this attempt on each of its nodes."""
        if self._choice is None:
            return {}
        return {node: shares * self._choice.share_size for node, shares in Counter(self._choice.node_ids).items()}

    def begin(self, nodes: Sequence[Node]) -> None:
        """Choose among what is free on `nodes` and begin the `fit`. Raises `PlacementError` when they do not hold the
        plan."""
        plan = self._request.plan
        choice = choose_shares(nodes, need_of(plan))
        self._domains = {node.node_id: node.domain for node in nodes}
        order = SupervisorOrder(
            address=self._channel.address,
            key=self._channel.key,
            attempt=self._number,
            engine=self._request.engine,
            preload=self._request.preload,
            logs_directory=str(Path(self._request.run_directory) / "logs"),
            device=plan.config.cluster.device,
            slots=choice.share_size,
            warm_sockets=self._warm_sockets,
            preemption_file=plan.config.fault_tolerance.preemption_file,
        )
        storage = Path(self._request.run_directory) / "logs" / "ray"
        storage.mkdir(parents=True, exist_ok=True)
        number = self._number
        self._thread = start_attempt(
            order, choice, storage, lambda error: self._channel.put("attempt", (number, error))
        )
        self._choice = choice

    def greeted(self, line: int, facts: dict[str, Any]) -> bool:
        """A supervisor has said where it is; True when all have."""
        self._facts[line] = facts
        return self._choice is not None and len(self._facts) == len(self._choice.node_ids)

    def node_of(self, line: int) -> tuple[str, str]:
        """(id, name) of the node behind a line."""
        facts = self._facts[line]
        return facts["node_id"], facts["name"]

    def trouble(self) -> NodeTrouble:
        """Which of this attempt's nodes are dead or about to go, as the cluster knows it now."""
        if self._choice is None or cluster_address() is None:
            return NodeTrouble()  # a cluster of our own is this machine
        mine = self.held.keys()
        leaving = {node_id: moment for node_id, moment in draining_nodes().items() if node_id in mine}
        return NodeTrouble(frozenset(mine - living_nodes(self._ray)), leaving)

    def owns(self, line: int) -> bool:
        """Whether the line is of a supervisor of this attempt."""
        return line in self._facts

    def assign(self) -> tuple[PlacedRank, ...]:
        """Rank -> slot, from where the shares really lie."""
        assert self._choice is not None
        size = self._choice.share_size
        next_slot: dict[str, int] = {}
        shares: list[LocatedShare] = []
        for facts in sorted(self._facts.values(), key=lambda facts: facts["share"]):
            devices = tuple(facts["devices"])
            if not devices:  # CPU slots have no number of their own: count them on each node
                first = next_slot.get(facts["node_id"], 0)
                next_slot[facts["node_id"]] = first + size
                devices = tuple(range(first, first + size))
            shares.append(self._located(facts, devices))
        return assign_coordinates(self._request.plan.ranks, shares)

    def _located(self, facts: dict[str, Any], devices: tuple[int, ...]) -> LocatedShare:
        domain = self._domains.get(facts["node_id"], "")
        return LocatedShare(facts["share"], facts["node_id"], facts["name"], devices, domain)

    def start(self, number: int, placed: Sequence[PlacedRank], left_out: tuple[int, ...] = ()) -> None:
        """Have every supervisor fork its ranks; `number` is the generation and the attempt that ranks see, `left_out`
        the steps that they leave out."""
        self._cleared.clear()
        ranks_on_node: dict[str, int] = {}
        for entry in placed:
            ranks_on_node[entry.node_id] = ranks_on_node.get(entry.node_id, 0) + 1
        for line, facts in self._facts.items():
            mine = [entry for entry in placed if entry.share == facts["share"]]
            threads = max(1, facts["cores"] // ranks_on_node[facts["node_id"]])
            tasks = [replace(self._task(entry, number, len(mine), threads, facts), left_out=left_out) for entry in mine]
            self._channel.send(line, {"kind": "start", "generation": number, "tasks": tasks})

    def spread_rendezvous(self, generation: int, line: int, port: int) -> None:
        """Rank 0 listens on `port` of the node behind `line`: tell all ranks."""
        host = "127.0.0.1" if self._one_node() else self._facts[line]["host"]
        self._send_all({"kind": "rendezvous", "generation": generation, "host": host, "port": port})

    def report_of(self, line: int, rank: int, event: dict[str, Any]) -> RankReport:
        """Where a rank is: the node of the supervisor that forwarded it, the device that the rank named (`cuda:N`)."""
        facts = self._facts[line]
        index = str(event.get("device", "")).partition("cuda:")[2]
        device = facts["devices"][int(index)] if index and facts["devices"] else None
        return RankReport(rank, facts["node_id"], device)

    def reservation_problems(self) -> tuple[Problem, ...]:
        """What Ray's own table of the attempt's placement group says otherwise than the choice."""
        assert self._choice is not None
        groups = self._groups()
        held: Counter[str] = Counter()
        for group in groups:
            held.update(bundle_nodes(group))
        wanted = Counter(self._choice.node_ids)
        if not groups or held == wanted:
            return ()
        differing = sorted((held - wanted) + (wanted - held))
        message = f"Ray reserved other nodes than were chosen: its placement group differs on {', '.join(differing)}."
        return (Problem("cluster", message, ""),)

    def _groups(self) -> set[str]:
        """Ids of the placement groups that supervisors are in: one, as far as is known."""
        return {str(group) for facts in self._facts.values() if (group := facts.get("placement_group"))}

    def stop(self, generation: int) -> None:
        """Ask all ranks to save and stop at the next step."""
        self._send_all({"kind": "stop", "generation": generation})

    def kill(self, generation: int, ask_where: Sequence[int] = ()) -> None:
        """End all ranks; those in `ask_where` write their stack to their log first."""
        self._send_all({"kind": "kill", "generation": generation, "ask_where": list(ask_where)})

    def cleared(self, line: int) -> bool:
        """A supervisor has no ranks left; True when none has."""
        self._cleared.add(line)
        return self._cleared >= self._facts.keys()

    def end(self) -> None:
        """Let the supervisors return and Ray Train end its `fit`. Where it waits for a worker on a node that does not
        answer, the nodes that do are taken from it."""
        self._send_all({"kind": "finish"})
        if self._thread is None:
            return
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            for group in self._groups():
                take_back(group)
            self._thread.join(_TAKEN_SECONDS)

    def _one_node(self) -> bool:
        return len({facts["node_id"] for facts in self._facts.values()}) == 1

    def _send_all(self, message: dict[str, Any]) -> None:
        for line in list(self._facts):
            self._channel.send(line, message)

    def _task(self, entry: PlacedRank, number: int, local_ranks: int, threads: int, facts: dict[str, Any]) -> RankTask:
        environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        if facts["devices"]:
            environment["CUDA_VISIBLE_DEVICES"] = facts["visible"]
        if cluster_address() is None:
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # our own cluster is bound to loopback, ranks as well
        return RankTask(
            plan=self._request.plan,
            rank=entry.rank,
            local_rank=entry.local_rank,
            local_ranks=local_ranks,
            run_directory=self._request.run_directory,
            attempt=number,
            threads=threads,
            command_started=self._request.command_started,
            environment={**environment, **self._request.environment},
        )
