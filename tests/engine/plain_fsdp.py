"""A training step of LLaMA-7B as a program of torch alone: its tensors at the peak, counted without numbers.

What the dry run's instruments are held against: figures of this program are known from another count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from models.llama.module import LlamaModel
from orchestrator.engine.dryrun_stand_ins import stand_ins
from orchestrator.engine.recompute import apply_recompute
from orchestrator.plan.make import make_plan
from tests.core import plan_cases
from tests.engine.tensor_tracker import TensorTracker

RANKS, SEQUENCE = 8, 4096


def peak_bytes(stage: int, recompute: str) -> int:
    """Bytes of all tensors at the peak of the second step."""
    config = plan_cases.config(
        plan_cases.LLAMA_7B,
        parallel={"data": RANKS},
        cluster={"device": "cpu", "gpu": {**plan_cases.A100_80GB, "memory_gib": 1000}},
        training={"global_batch_size": RANKS, "micro_batch_size": 1},
    )
    with stand_ins(make_plan(config), 0) as device:
        model = _wrapped(config.model, stage, recompute)
        model.to_empty(device="meta")
        model.initialise_buffers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64, device=device)

        def step() -> None:
            logits = model(tokens)
            functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten()).backward()
            del logits
            optimizer.step()
            optimizer.zero_grad()

        step()
        tracker = TensorTracker()
        tracker.add([*model.parameters(), *model.buffers()])
        for state in optimizer.state.values():
            tracker.add(state.values())
        with tracker:
            step()
    return tracker.peak_bytes


def _wrapped(sizes: Any, stage: int, recompute: str) -> LlamaModel:
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (RANKS,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    model = LlamaModel(sizes)
    blocks = list(model.layers.children())
    apply_recompute(blocks, recompute, dropout=False)  # type: ignore[arg-type]
    for unit in (*blocks, model):
        if stage == 0:
            replicate(unit, **options)
        else:
            fully_shard(unit, **options, reshard_after_forward=stage == 3)
    return model
