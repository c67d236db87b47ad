"""Memory of one step, four ways: planned, simulated (`dryrun`), counted by tensor, and as allocator and device see it.

The differences are what a margin has to cover: `allocator_share` is what the allocator holds beyond the tensors at
their peak, `context_bytes` what the device has lent out beyond the allocator (CUDA context, libraries, NCCL; other
processes too, so the GPU should be idle). Both are figures to put beside `orchestrator/plan/constants.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.plan.run_plan import RunPlan
from tests.gpu.alone import Link, device_figures, in_child, plan_of, task_of
from tests.gpu.setting import Setting

TOLERANCE = 0.10
"""Of planned and simulated tensor peaks against the counted one."""

CASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("plain", ()),
    ("full recompute", ("training.activation_checkpointing=full",)),
    ("ZeRO-3", ("parallel.zero_stage=3",)),
)


def memory(setting: Setting) -> tuple[dict[str, Any], list[str]]:
    """(figures by case, problems)."""
    figures: dict[str, Any] = {}
    problems: list[str] = []
    # A rehearsal needs no more than one of them.
    for name, more in CASES if setting.device == "cuda" else CASES[-1:]:
        words = setting.words(*setting.large, "training.steps=3", "training.precision=bf16_mixed", *more)
        plan = plan_of(words)
        folder = setting.folder / f"memory-{name.replace(' ', '-')}"
        folder.mkdir(parents=True, exist_ok=True)
        counted, device = in_child(_measure, plan, folder)
        simulated = in_child(_simulate, plan)
        planned = _planned(plan)
        total = sum(counted.values())
        figures[name] = {
            "planned": planned,
            "simulated": simulated,
            "counted": counted,
            **device,
            **_margins(total, device),
        }
        for kind, other in (("planned", planned), ("simulated", simulated)):
            peak = sum(size for category, size in other.items() if category != "reserve")
            if abs(peak - total) > TOLERANCE * total and setting.device == "cuda":
                problems.append(f"{name}: {kind} tensors {peak:,} bytes, counted {total:,}")
    return figures, problems


def _measure(plan: RunPlan, folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """(tensor bytes by category at the peak of a steady step, what allocator and device say of a plain one)."""
    import torch

    from orchestrator.engine.account import account
    from orchestrator.engine.build import build
    from orchestrator.engine.compute import prepare_process
    from orchestrator.engine.feed import micro_batch
    from orchestrator.engine.mesh import build_mesh
    from orchestrator.engine.rendezvous import meet
    from orchestrator.engine.step import train_step

    assert plan.parallel is not None
    task = task_of(plan, folder)
    device = prepare_process(task)
    meet(task, Link(), device)  # type: ignore[arg-type]
    parts = build(plan, build_mesh(plan.parallel, device.type), device)
    training = plan.config.training
    rows = torch.randint(0, plan.config.model.vocab_size, (training.micro_batch_size, training.sequence_length + 1))
    count = plan.parallel.micro_batches
    tokens = count * training.micro_batch_size * training.sequence_length

    def step() -> None:
        train_step(parts, [micro_batch(rows.numpy(), device) for _ in range(count)], tokens)

    step()
    figures: dict[str, int] = {}
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        figures = device_figures()
    with account(parts) as found:
        step()
    return dict(found.peak), figures


def _simulate(plan: RunPlan) -> dict[str, int]:
    from orchestrator.engine.dryrun import simulate

    found = simulate(plan, 0)
    if found.error:
        raise AssertionError(f"{found.failed_while}: {found.error}\n{found.traceback}")
    return found.memory


def _planned(plan: RunPlan) -> dict[str, int]:
    assert plan.memory is not None
    (rank,) = plan.memory.pipeline_ranks
    names = ("parameters", "gathered", "gradients", "optimizer", "activations", "logits", "buffers", "reserve")
    return {name: getattr(rank, f"{name}_bytes") or 0 for name in names}


def _margins(counted: int, device: dict[str, int]) -> dict[str, float | None]:
    """What lies between tensors, allocator and device; None on a CPU."""
    if not device:
        return {"tensors_over_allocated": None, "allocator_share": None, "context_bytes": None}
    return {
        "tensors_over_allocated": counted / device["allocated_peak_bytes"],
        "allocator_share": device["reserved_peak_bytes"] / device["allocated_peak_bytes"] - 1,
        "context_bytes": device["used_bytes"] - device["reserved_bytes"],
    }
