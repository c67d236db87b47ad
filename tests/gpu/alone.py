"""One rank of the real engine on one device, each in a process of its own: what the checks of this folder run.

A fresh process for each training keeps its memory figures its own, and a crash or an exhausted GPU takes nothing else
with it. Processes are forked from a warm server that has imported torch and never touched CUDA.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from orchestrator import load_config, make_plan
from orchestrator.plan.rank_task import RankTask
from orchestrator.plan.run_plan import RunPlan

TIMEOUT_SECONDS = 420
"""Of one training, compilation included."""

_CONTEXT = multiprocessing.get_context("forkserver")


class ChildFailedError(AssertionError):
    """A process of a check raised or died; the message is its traceback."""


@dataclass
class Link:
    """A `RankLink` of a rank that is alone: keeps what it says, asks for a stop when a given step begins."""

    stop_at_step: int | None = None
    at_first_step: Callable[[], None] | None = None
    """Called once, when the model stands."""
    events: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0

    def beat(self, phase: str, step: int) -> None:
        if step > 0 and self.at_first_step is not None:
            self.at_first_step()
            self.at_first_step = None
        self.step = step

    def pace(self, own_seconds: float) -> None:
        return None

    def report(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def stop_requested(self) -> bool:
        return self.stop_at_step is not None and self.step >= self.stop_at_step

    def rendezvous(self, port: int | None) -> tuple[str, int]:
        assert port is not None, "there are no others"
        return "localhost", port


@dataclass(frozen=True)
class Trained:
    """What a training came to."""

    plan: RunPlan
    records: list[dict[str, Any]]
    """`metrics.jsonl`, by step."""
    events: list[dict[str, Any]]
    evidence: dict[str, Any] | None
    """Of memory that ran out; None: it did not."""
    device: dict[str, int]
    """Bytes: peaks of allocator and device; empty on a CPU."""

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records]


def plan_of(overrides: Sequence[str]) -> RunPlan:
    """The plan of what a user would type; raises AssertionError with all problems.

    FP16 is refused on a CPU because it gains nothing there; it computes all the same, so it is planned as BF16 there.
    """
    words = list(overrides)
    config = load_config(words)
    fp16_on_cpu = config.cluster.device == "cpu" and config.training.precision == "fp16_mixed"
    if fp16_on_cpu:
        words = [word.replace("=fp16_mixed", "=bf16_mixed") for word in words]
    plan = make_plan(load_config(words))
    assert not plan.problems, "\n".join(map(str, plan.problems))
    return replace(plan, config=config) if fp16_on_cpu else plan


def train(
    overrides: Sequence[str],
    folder: Path,
    *,
    attempt: int = 1,
    stop_at_step: int | None = None,
    memory_limit_bytes: int | None = None,
) -> Trained:
    """A whole training through `run_rank`, in a process of its own. `memory_limit_bytes`: by how much the allocator of
    its GPU, or on a CPU the process, may grow from the first step on."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan_of(overrides)
    return in_child(_train, plan, folder, attempt, stop_at_step, memory_limit_bytes)  # type: ignore[no-any-return]


def task_of(plan: RunPlan, folder: Path, attempt: int = 1) -> RankTask:
    """The one rank's task."""
    return RankTask(
        plan=plan,
        rank=0,
        local_rank=0,
        local_ranks=1,
        run_directory=str(folder),
        attempt=attempt,
        threads=int(os.environ.get("OMP_NUM_THREADS", "1")),
        command_started=time.time(),
        environment={},
    )


def _train(plan: RunPlan, folder: Path, attempt: int, stop_at_step: int | None, limit: int | None) -> Trained:
    from orchestrator.engine.rank import run_rank
    from orchestrator.tracking.metrics_log import read_records

    cuda, link, evidence = plan.config.cluster.device == "cuda", Link(stop_at_step), None
    if limit is not None:
        link.at_first_step = partial(_limit_memory, limit, cuda=cuda)
    try:
        run_rank(task_of(plan, folder, attempt), link)  # type: ignore[arg-type]
    except Exception as error:
        evidence = getattr(error, "evidence", None)
        if evidence is None:
            raise
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    log = folder / "metrics.jsonl"
    return Trained(
        plan, read_records(log) if log.exists() else [], link.events, evidence, device_figures() if cuda else {}
    )


def _limit_memory(limit: int, *, cuda: bool) -> None:
    if cuda:
        import torch

        torch.cuda.empty_cache()
        allowed = torch.cuda.memory_reserved(0) + limit
        torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory, 0)
        return
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + limit, resource.RLIM_INFINITY))


def device_figures() -> dict[str, int]:
    """Peaks of the allocator, and what the device has lent out now, in bytes (CUDA)."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return {
        "allocated_peak_bytes": torch.cuda.max_memory_allocated(0),
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(0),
        "reserved_bytes": torch.cuda.memory_reserved(0),
        "used_bytes": total - free,
        "total_bytes": total,
    }


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)` returns in a process of its own. Raises ChildFailedError with its traceback."""
    _CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "orchestrator.engine.rank"])
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_main, args=(sender, function, args), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(TIMEOUT_SECONDS):
            raise ChildFailedError(f"not done within {TIMEOUT_SECONDS} s")
        try:
            worked, value = pickle.loads(receiver.recv_bytes())
        except EOFError:
            process.join(5)
            raise ChildFailedError(f"its process died with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if not worked:
        raise ChildFailedError(value)
    return value


def _main(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        outcome = (True, function(*args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(outcome))
    os._exit(0)  # threads of gloo and NCCL may abort an interpreter that exits normally
