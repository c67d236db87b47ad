"""A run under faults: real raylets, the real command, the real engine; everything is done to it from outside.

`Nodes` is a cluster of small nodes that can be removed, added and drained; `Command` a training on it whose ranks can
be killed, stopped, blocked, slowed down and kept from writing. What happened is read from the run's folder.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.conftest import processes_with

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 900.0
MARK = "ORCHESTRATOR_TEST_SOAK"
"""Variable that every process of the cluster and of the command inherits."""


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`; fails when it does not come."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"it did not happen in time: {what}"
        time.sleep(0.05)
    return value


class Nodes:
    """A head without slots, and nodes of `slots` CPU slots and `gpus` pretended GPUs each."""

    def __init__(self, nodes: int, slots: int = 1, gpus: int = 0, **engine: str) -> None:
        """`engine` are `SOAK_*` settings of `soak_engine.py`, in small letters and without the prefix."""
        from ray.cluster_utils import Cluster

        self.mark = f"{os.getpid()}-{time.monotonic_ns()}"
        os.environ[MARK] = self.mark
        # A Ray process that gives itself a title writes over its environment, and the mark with it.
        os.environ["SPT_NOENV"] = "1"
        self._settings = {f"SOAK_{name.upper()}": value for name, value in {"step_seconds": "0.1", **engine}.items()}
        os.environ.update(self._settings)
        self._small = {"object_store_memory": 80 * 2**20}
        head = {"include_dashboard": False, "no_monitor": True, "include_log_monitor": False, "num_cpus": 0}
        # On a machine that is busy with other things a node may answer late; it is not dead for that.
        system = {"_system_config": {"health_check_failure_threshold": 100}}
        self._cluster = Cluster(initialize_head=True, head_node_args={**self._small, **head, **system})
        self._slots, self._gpus = slots, gpus
        self._by_id: dict[str, Any] = {}
        self.address = self._cluster.address
        for _ in range(nodes):
            self.add()

    def add(self, **more: Any) -> str:
        """Another node, with `more` of what Ray lets a node have; its id."""
        node = self._cluster.add_node(num_cpus=self._slots, num_gpus=self._gpus, **self._small, **more)
        self._by_id[node.node_id] = node
        return str(node.node_id)

    def remove(self, node_id: str) -> None:
        """End a node with everything on it, without a word."""
        self._cluster.remove_node(self._by_id.pop(node_id), allow_graceful=False)

    @contextlib.contextmanager
    def held(self, node_id: str, *, everything: bool = False) -> Iterator[None]:
        """Keep a node's own Ray process from answering, or `everything` on it, as on a machine that has lost its
        network: it lives, and its connections stay open."""
        raylet = self._by_id[node_id].all_processes["raylet"][0].process.pid
        processes = [raylet, *(_descendants(raylet) if everything else ())]
        for process in processes:
            os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)

    def alive(self, node_id: str) -> bool:
        """Whether the head still counts a node as alive."""
        import ray

        client = ray._raylet.GcsClient(address=self.address)
        return bool(client.check_alive([ray.NodeID.from_hex(node_id)], timeout=30)[0])

    def drain(self, node_id: str, seconds: int) -> None:
        """Tell Ray that a node is preempted in `seconds`, as clouds and autoscalers do."""
        import ray
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        client = ray._raylet.GcsClient(address=self.address)
        accepted, why = client.drain_node(node_id, reason, "spot", int((time.time() + seconds) * 1000))
        assert accepted, why

    def close(self) -> list[str]:
        """End the cluster; what of it or of its commands lives on after a while."""
        self._cluster.shutdown()
        for name in (MARK, "SPT_NOENV", *self._settings):
            os.environ.pop(name, None)
        deadline = time.monotonic() + 30
        while (left := processes_with(f"{MARK}={self.mark}")) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [_command_line(process) for process in left]

    def ranks_running(self) -> list[str]:
        """Command lines of ranks, keepers and warm processes of this cluster's commands."""
        lines = [_command_line(process) for process in processes_with(f"{MARK}={self.mark}")]
        return [line for line in lines if "warm_main" in line or "soak_main" in line]


def _descendants(process: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [process]
    for parent in found:  # grows
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def _command_line(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


class Command:
    """A training of a very small model on `ranks` nodes of one slot each."""

    def __init__(
        self, nodes: Nodes, folder: Path, name: str, *, ranks: int, steps: int, words: tuple[str, ...]
    ) -> None:
        self.run = folder / "runs" / name
        self._environment = {**os.environ, "RAY_ADDRESS": nodes.address, "OMP_NUM_THREADS": "1", MARK: nodes.mark}
        self._words = [
            sys.executable, "-m", "tests.launch.soak_main", f"run.name={name}", f"run.directory={folder / 'runs'}",
            *self.settings(ranks=ranks, steps=steps, cache=folder / "cache"), *words,
        ]  # fmt: skip
        self._process: subprocess.Popen[str] | None = None

    @staticmethod
    def settings(*, ranks: int, steps: int, cache: Path) -> list[str]:
        """What is learned, and on how many nodes."""
        return [
            f"cluster.nodes={ranks}", "cluster.gpus_per_node=1", "cluster.gpu.memory_gib=4", "model.hidden_size=64",
            "model.intermediate_size=128", "model.num_hidden_layers=2", "model.num_attention_heads=4",
            "model.max_position_embeddings=64", "training.sequence_length=64", "training.global_batch_size=12",
            "training.micro_batch_size=3", f"training.steps={steps}", "training.validate_every_steps=0",
            "training.validation_sequences=8", "data=synthetic", f"data.cache_directory={cache}",
        ]  # fmt: skip

    def start(self) -> None:
        """Begin; the command runs until `ended`."""
        self.run.parent.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            self._words, cwd=ROOT, env=self._environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def ended(self) -> tuple[int, str]:
        """Exit code, and what was said on both streams."""
        assert self._process is not None
        out, err = self._process.communicate(timeout=PATIENCE_SECONDS)
        return self._process.returncode, out + err

    def kill(self) -> None:
        """End it at once, when a test has failed."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()

    # -- what is seen ---------------------------------------------------------------------------------------------

    def _lines(self, file: Path) -> list[dict[str, Any]]:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def records(self) -> list[dict[str, Any]]:
        """`metrics.jsonl`."""
        return self._lines(self.run / "metrics.jsonl")

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What the launcher said of one kind."""
        return [event for event in self._lines(self.run / "logs" / "launcher.jsonl") if event["kind"] == kind]

    def summary(self) -> dict[str, Any]:
        """`summary.json`."""
        found: dict[str, Any] = json.loads((self.run / "summary.json").read_text(encoding="utf-8"))
        return found

    def wait(self, condition: Callable[[], Any], what: str) -> Any:
        """As `wait_until`, as long as the command lives."""
        assert self._process is not None

        def alive() -> Any:
            assert self._process is not None
            assert self._process.poll() is None, f"ended while waiting for {what}: {self._process.communicate()}"
            return condition()

        return wait_until(alive, what)

    def wait_for_steps(self, more: int, *, attempt: int) -> int:
        """Until `attempt` has done `more` steps; the last of them."""

        def done() -> int:
            steps = [record["step"] for record in self.records() if record["attempt"] == attempt]
            return max(steps) if len(steps) >= more else 0

        return int(self.wait(done, f"{more} steps of attempt {attempt}"))

    def place(self, rank: int, *, attempt: int) -> dict[str, Any]:
        """Where a rank of `attempt` is: node_id, pid."""

        def found() -> dict[str, Any] | None:
            ready = [event for event in self.events("ready") if event["attempt"] == attempt]
            return ready[0]["ranks"][rank] if ready else None

        identity: dict[str, Any] = found() or self.wait(found, f"attempt {attempt} is ready")
        return identity

    def found(self, attempt: int) -> int:
        """Step of the newest complete checkpoint when an attempt began; 0: there was none."""
        return int((self.run / "found" / str(attempt)).read_text(encoding="utf-8"))

    def report(self) -> str:
        """How long the start took, and after each failure the way back to the next first step, in parts (seconds)."""
        summary = self.summary()
        attempts = summary["attempts"]
        rows = [("the start", summary["start_seconds"])]
        for before, after in itertools.pairwise(attempts):
            rows.append((f"{before['cause']} at step {before['last_step']}", after["recovery_parts"]))
        lines = []
        for what, parts in rows:
            text = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
            lines.append(f"{what:24} {sum(parts.values()):6.2f} s to the first step: {text}")
        return "\n".join(lines)

    # -- what is done to it ---------------------------------------------------------------------------------------

    def signal(self, rank: int, number: signal.Signals, *, attempt: int) -> None:
        """Send a rank a signal."""
        os.kill(self.place(rank, attempt=attempt)["pid"], number)

    def press(self, what: str, text: str = "") -> Path:
        """Make a file in `faults/` (see `soak_engine.py`)."""
        folder = self.run / "faults"
        folder.mkdir(exist_ok=True)
        half = folder / f".{what}"
        half.write_text(text, encoding="utf-8")
        return half.rename(folder / what)

    def hold(self) -> None:
        """Let the ranks begin no step but the next few, until `release`."""
        last = max((record["step"] for record in self.records()), default=0)
        self.press("hold", str(last + 3))

    def release(self) -> None:
        """Let the ranks go on."""
        (self.run / "faults" / "hold").unlink()

    def limit_writing(self, rank: int, size_bytes: int, *, attempt: int) -> None:
        """Let a rank write no file larger than this, as on a full disk; -1: as large as it likes."""
        pid = self.place(rank, attempt=attempt)["pid"]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


def undisturbed(folder: Path, *, steps: int, ranks: int = 2, left_out: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """The record of the same training without Ray and without faults; the updates of steps in `left_out` are."""
    from orchestrator import load_config, make_plan
    from orchestrator.tracking.metrics_log import read_records
    from tests.engine.cases import tasks_of
    from tests.engine.gloo import live

    sizes = Command.settings(ranks=ranks, steps=steps, cache=folder / "cache")
    plan = make_plan(load_config([*sizes, f"run.directory={folder}", f"tracking.uri=sqlite:///{folder / 'x.db'}"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(MARK, raising=False)  # what starts ranks for tests lives on, and is nothing of the cluster's
        live([replace(task, left_out=left_out) for task in tasks_of(plan, folder / "alone")])
    return list(read_records(folder / "alone" / "metrics.jsonl"))
