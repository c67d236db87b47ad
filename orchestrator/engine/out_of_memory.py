"""Evidence when memory runs out: who held it, beside what the plan gave each category, and a snapshot to look into.

Owns `memory/` in the run's folder and the exception's `evidence`, which the driver turns into the next plan that fits:
{"kind", "categories", "planned" (bytes by category), "worst_category", "snapshot" (path), ...}. Costs a training
nothing but, on a GPU, a ring of the allocator's last events, kept without stacks. Where nothing can be gathered the
error goes on without evidence. Categories of live tensors: `holdings.py`.
"""

from __future__ import annotations

import gc
import json
import pickle
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchestrator.engine.compute import resident_bytes
from orchestrator.engine.gradients import local
from orchestrator.engine.holdings import known
from orchestrator.engine.step import Parts
from orchestrator.plan.after_oom import worst_category
from orchestrator.plan.rank_task import RankTask
from orchestrator.plan.validate.wording import gib

FOLDER = "memory"
RING_ENTRIES = 100_000
"""Allocator events that a GPU rank keeps, about 10 MiB of host memory: the last few steps of a small model, the last
layers of a large one. No stacks are taken: those would cost microseconds at each allocation."""
_LARGEST_TENSORS = 20

CATEGORIES = ("parameters", "gathered", "gradients", "optimizer", "activations", "reserve")
"""As the plan has them; `activations` with logits and buffers, which cannot be told apart once the step is broken off;
`reserve`: what is no tensor (the CUDA context, NCCL, the allocator's gaps; on a CPU the process before the model)."""

_SIZES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ASKED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)?) (bytes|[KMGT]iB)")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether device or host memory ran out; torch's CPU allocator raises a plain RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def record_allocations(device: torch.device) -> None:
    """Keep the GPU allocator's last events from now on, for a snapshot; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=RING_ENTRIES, device=device)


@dataclass
class Witness:
    """What a rank tells about itself while it lives, so that its end can be explained."""

    task: RankTask
    before_bytes: int = field(default_factory=resident_bytes)
    """Resident set of the process before it held any tensor."""
    parts: Parts | None = None
    """None: the model does not stand yet."""


@contextmanager
def evidence_of_exhaustion(task: RankTask) -> Iterator[Witness]:
    """Give an out-of-memory error that leaves the block its `evidence`, and raise it on."""
    witness = Witness(task)
    try:
        yield witness
    except Exception as error:
        if is_out_of_memory(error):
            with suppress(Exception):
                error.evidence = gather(witness, error)  # type: ignore[attr-defined]
        raise


def gather(witness: Witness, error: BaseException) -> dict[str, Any]:
    """Account for what is held now, compare it with the plan, write both and the snapshot into the run's folder."""
    task, parts = witness.task, witness.parts
    device = _device(parts)
    asked = asked_bytes(str(error))
    measured = measure(witness, device)
    category = category_at_work(error) if parts is not None else "parameters"
    measured[category] += asked or 0
    planned = planned_bytes(task)
    evidence: dict[str, Any] = {
        "kind": "out_of_memory",
        "categories": measured,
        "planned": planned,
        "worst_category": worst_category(measured, planned),
        "snapshot": None,
        "asked_bytes": asked,
        "asked_for": category,
        "capacity_bytes": task.plan.memory.capacity_bytes if task.plan.memory else None,
        "device": _device_figures(device),
    }
    folder = Path(task.run_directory) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / f"attempt-{task.attempt:02d}-rank-{task.rank:03d}"
    evidence["snapshot"] = str(_write_snapshot(base, device))
    told = {**evidence, "error": str(error), "largest_tensors": largest_tensors(parts)}
    base.with_suffix(".json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    text = describe(evidence)
    base.with_suffix(".txt").write_text(text, encoding="utf-8")
    print(text, file=sys.stderr, flush=True)
    return evidence


def measure(witness: Witness, device: torch.device) -> dict[str, int]:
    """Bytes by category that the rank holds on its device (a CPU: in its process), each storage once."""
    found = dict.fromkeys(CATEGORIES, 0)
    counted: set[int] = set()
    for category, tensor in known(witness.parts) if witness.parts is not None else ():
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and category in found and storage._cdata not in counted:
            counted.add(storage._cdata)
            found[category] += storage.nbytes()
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_allocated(device)
        found["reserve"] = total - free - held
    else:
        found["reserve"] = witness.before_bytes
        held = max(0, resident_bytes() - witness.before_bytes)
    rest = "activations" if witness.parts is not None else "parameters"
    found[rest] += max(0, held - sum(found[name] for name in CATEGORIES if name != "reserve"))
    return found


def planned_bytes(task: RankTask) -> dict[str, int]:
    """What the plan gave this rank, in the same categories; empty where it has no memory plan."""
    memory, place = task.plan.memory, task.plan.ranks[task.rank]
    if memory is None:
        return {}
    rank = next(entry for entry in memory.pipeline_ranks if entry.pipeline == place.pipeline)
    planned = {name: getattr(rank, f"{name}_bytes") or 0 for name in CATEGORIES}
    planned["activations"] += (rank.logits_bytes or 0) + (rank.buffers_bytes or 0)
    return planned


def asked_bytes(message: str) -> int | None:
    """Size of the allocation that failed, from the allocator's words; None where it does not say."""
    found = _ASKED.search(message)
    return None if found is None else round(float(found[1]) * _SIZES[found[2]])


def category_at_work(error: BaseException) -> str:
    """What the allocation that failed was for, told from where in torch it was asked for; else activations."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        file, function = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
        if "/torch/optim/" in file:
            return "optimizer"
        if "/_fully_shard/" in file and ("all_gather" in function or "unshard" in function):
            return "gathered"
    return "activations"


def largest_tensors(parts: Parts | None) -> list[dict[str, Any]]:
    """The largest storages that Python can see, with the names of parameters; what a graph alone holds is not among
    them."""
    names: dict[int, str] = {}
    if parts is not None:
        for name, parameter in parts.parameters.items():
            names[local(parameter).untyped_storage()._cdata] = name
    seen: dict[int, dict[str, Any]] = {}
    for value in gc.get_objects():
        if not issubclass(type(value), Tensor):
            continue
        with suppress(Exception):
            tensor = local(value)
            storage = tensor.untyped_storage()
            shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            entry = {"bytes": storage.nbytes(), "shape": shape, "dtype": dtype, "device": str(tensor.device)}
            seen.setdefault(storage._cdata, entry)["parameter"] = names.get(storage._cdata)
    return sorted(seen.values(), key=lambda entry: -int(entry["bytes"]))[:_LARGEST_TENSORS]


def describe(evidence: Mapping[str, Any]) -> str:
    """The account as a table for a person."""
    measured, planned = evidence["categories"], evidence["planned"]
    lines = ["Memory ran out. Held at that moment, the allocation that failed included, beside the plan:", ""]
    lines.append(f"{'category':<14}{'held':>12}{'planned':>12}{'more':>12}")
    for name in CATEGORIES:
        more = measured[name] - planned.get(name, 0)
        mark = "   <- exceeded the plan by most" if name == evidence["worst_category"] else ""
        lines.append(f"{name:<14}{gib(measured[name]):>12}{gib(planned.get(name, 0)):>12}{gib(more):>12}{mark}")
    total, expected = sum(measured.values()), sum(planned.values())
    lines.append(f"{'total':<14}{gib(total):>12}{gib(expected):>12}{gib(total - expected):>12}")
    if evidence["asked_bytes"] is not None:
        lines.append(f"The allocation that failed: {gib(evidence['asked_bytes'])}, for {evidence['asked_for']}.")
    device = evidence["device"]
    if "other_bytes" in device:
        lines.append(f"No tensors of this process, or other processes: {gib(device['other_bytes'])} of the device.")
    elif "available_bytes" in device:
        lines.append(f"The host had {gib(device['available_bytes'])} left.")
    lines.append(f"Snapshot: {evidence['snapshot']}")
    return "\n".join(lines) + "\n"


def _device(parts: Parts | None) -> torch.device:
    if parts is not None:
        return parts.device
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda", torch.cuda.current_device()) if begun else torch.device("cpu")


def _device_figures(device: torch.device) -> dict[str, int]:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        figures = {"total_bytes": total, "free_bytes": free, "allocated_bytes": allocated, "reserved_bytes": reserved}
        return {**figures, "other_bytes": total - free - reserved}
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return {"available_bytes": int(line.split()[1]) * 1024}
    return {}


def _write_snapshot(base: Path, device: torch.device) -> Path:
    """On a GPU the allocator's own (for https://pytorch.org/memory_viz); on a CPU the account is all there is."""
    if device.type != "cuda":
        return base.with_suffix(".json")
    path = base.with_suffix(".pickle")
    with path.open("wb") as file:
        pickle.dump(torch.cuda.memory._snapshot(device), file)
    return path
