"""What the process computes on and how: device, threads, determinism. Called once, before anything is built."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import sys
from pathlib import Path

import numpy as np
import torch

from orchestrator.config.schema import RunConfig
from orchestrator.engine.allocator import keep_freed_memory
from orchestrator.engine.initialise import block_seed
from orchestrator.engine.mesh import Mesh
from orchestrator.plan.rank_task import RankTask


def prepare_process(task: RankTask) -> torch.device:
    """Set threads, seeds and determinism of this process and return its device.

    Raises RuntimeError if the plan asks for CUDA and the process sees no GPU.
    """
    training, cluster = task.plan.config.training, task.plan.config.cluster
    torch.set_num_threads(task.threads)
    random.seed(training.seed)
    np.random.seed(training.seed % 2**32)
    torch.manual_seed(training.seed)
    if training.deterministic:
        # cuBLAS asks for this before its first call; without it, deterministic mode raises.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Deterministic mode would also fill every new tensor with NaN: a debugging aid that costs memory bandwidth.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if cluster.device == "cpu":
        keep_freed_memory()
        finish_time_slices()
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(f"rank {task.rank} is to compute on CUDA but sees no GPU")
    index = task.local_rank if torch.cuda.device_count() > 1 else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def finish_time_slices() -> None:
    """Have the kernel not interrupt this thread, and those that it starts, when another one wakes up (SCHED_BATCH).

    Ranks that share cores wake each other up with every message; eight ranks on two cores lost a fifteenth of their
    processor time to being interrupted for it. Where the system knows no such thing, nothing changes.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: allocated by tensors on a GPU, resident set of the process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    # The kernel's own high-water mark of this process. `getrusage` also counts what the parent held before the fork.
    peak = _status_bytes("VmHWM:")
    if peak is not None:
        return peak
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def resident_bytes() -> int:
    """Resident set of the process now; where the kernel does not tell, its high-water mark."""
    now = _status_bytes("VmRSS:")
    return peak_memory_bytes(torch.device("cpu")) if now is None else now


def _status_bytes(name: str) -> int | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    found = [line for line in status.read_text(encoding="ascii").splitlines() if line.startswith(name)]
    return int(found[0].split()[1]) * 1024 if found else None


def seed_step(config: RunConfig, mesh: Mesh, step: int) -> None:
    """Seed dropout for a step, where there is any: a function of seed, step and data rank, so nothing is saved or
    restored.

    Data ranks draw different masks for their different samples, and pipeline ranks for their layers; tensor ranks start
    alike (`dropout.py`).
    """
    if config.model.attention_dropout == 0 and config.model.resid_pdrop == 0:
        return
    torch.manual_seed(block_seed(config.training.seed, f"dropout {mesh.data_rank} {mesh.pipeline_rank}", step))


def describe_device(device: torch.device) -> str:
    """What the rank computes on, for the placement table: `cpu`, or the GPU's name and unique id."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.uuid}"
