"""LLaMA-2-70B on 128 ranks as a program of torch's own parallelism: tensor 8, sequence parallel, pipeline 4, data 4.

What the dry run's instruments are held against: figures of this program are known from another count. `fully_shard`,
`parallelize_module`, `PipelineStage` and `Schedule1F1B` are used as their documentation shows them; the engine has no
part in it but the recomputation of a block. `python -m tests.engine.plain_pipeline` sets what it holds beside what the
engine holds for the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from models.llama.module import LlamaModel
from orchestrator.engine.account import Watch
from orchestrator.engine.dryrun import simulate
from orchestrator.engine.dryrun_stand_ins import stand_ins
from orchestrator.engine.mesh import Mesh, build_mesh
from orchestrator.engine.recompute import apply_recompute
from orchestrator.plan.make import make_plan
from orchestrator.plan.run_plan import RunPlan
from tests.core import plan_cases
from tests.engine.tensor_tracker import TensorTracker

SEQUENCE, MICRO_BATCHES, PIPELINE, TENSOR, DATA = 4096, 8, 4, 8, 4
BLOCKS = 20
"""Of a pipeline rank."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Bytes of all tensors at the peak of the second step."""

    bytes: int
    """As `TensorTracker` counts."""
    memory: dict[str, int]
    """As the engine's own account counts, by category."""


def peaks(rank: int, recompute: str, *blocks: int) -> list[Counted]:
    """The peak of a rank, for each number of blocks of a pipeline stage.

    In a process of its own: torch remembers what it worked out for distributed tensors by names of groups, and a second
    rank's groups have the same names.
    """
    with get_context("forkserver").Pool(1) as process:
        return process.starmap(_count, [(rank, recompute, count) for count in blocks])


def _count(rank: int, recompute: str, blocks: int) -> Counted:
    plan = declared(recompute, blocks)
    assert plan.parallel is not None
    with stand_ins(plan, rank) as device:
        mesh = build_mesh(plan.parallel, "cpu")
        model = _wrapped(plan, mesh, recompute)
        model.to_empty(device="meta")
        model.initialise_buffers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        stage = _stage(model, mesh, plan, device)
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=_loss)
        tokens = torch.zeros(MICRO_BATCHES, SEQUENCE, dtype=torch.int64, device=device)

        def step() -> None:
            schedule.step(*((tokens,) if stage.is_first else ()), **({"target": tokens} if stage.is_last else {}))
            optimizer.step()
            optimizer.zero_grad()

        with Watch(_parts(model, optimizer, mesh, device)) as watch:
            step()
            tracker = _following(model, optimizer, stage, tokens)
            watch.begin()
            with tracker:
                step()
            memory = watch.finish().peak
    return Counted(tracker.peak_bytes, {str(name): size for name, size in memory.items()})


def declared(recompute: str, blocks: int = BLOCKS, *, stage: int = 2, device: str = "cpu") -> RunPlan:
    """The plan. Of a CPU's kernels norms are not fused, so that they keep what their formula is made of."""
    config = plan_cases.config(
        {**plan_cases.LLAMA2_70B, "num_hidden_layers": PIPELINE * blocks},
        parallel={
            "data": DATA,
            "tensor": TENSOR,
            "pipeline": PIPELINE,
            "zero_stage": stage,
            "schedule": "1f1b",
            "sequence_parallel": True,
        },
        cluster={"device": device, "nodes": 16, "gpu": {**plan_cases.A100_80GB, "memory_gib": 1000}},
        training={
            "global_batch_size": DATA * MICRO_BATCHES,
            "micro_batch_size": 1,
            "activation_checkpointing": recompute,
        },
    )
    return make_plan(config)


def _wrapped(plan: RunPlan, mesh: Mesh, recompute: str) -> LlamaModel:
    sizes = plan.config.model
    each = sizes.num_hidden_layers // PIPELINE
    first = mesh.pipeline_rank * each
    model = LlamaModel(
        sizes,
        range(first, first + each),
        embedding=mesh.pipeline_rank == 0,
        head=mesh.pipeline_rank == PIPELINE - 1,
    )
    blocks = list(model.layers.children())
    for block in blocks:
        block.attention.core.forward = _attention  # type: ignore[union-attr]
    parallelize_module(model, mesh.tensor, _styles(model))
    apply_recompute(blocks, recompute, dropout=False)  # type: ignore[arg-type]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*blocks, model):
        fully_shard(unit, mesh=mesh.sharding, mp_policy=policy, reshard_after_forward=False)
    return model


def _styles(model: LlamaModel) -> dict[str, ParallelStyle]:
    """The stream is cut along the sequence; attention and MLP put it together once for the products behind them."""
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    styles: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for layer in model.layers:
        styles |= {f"layers.{layer}.{name}": SequenceParallel() for name in ("attention_norm", "mlp_norm")}
        styles |= {f"layers.{layer}.{name}": PrepareModuleInput(**whole) for name in ("attention", "mlp")}
        for name in ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            styles[f"layers.{layer}.{name}"] = ColwiseParallel()
        for name in ("attention.o_proj", "mlp.down_proj"):
            styles[f"layers.{layer}.{name}"] = RowwiseParallel(output_layouts=Shard(1))
    return {name: style for name, style in styles.items() if not (name in _ENDS and getattr(model, name) is None)}


_ENDS = ("embedding", "norm", "head")


def _attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As in Hugging Face's LLaMA: heads come before positions, keys and values are repeated for each query head."""
    repeats = query.shape[2] // key.shape[2]
    query = query.transpose(1, 2).contiguous()
    key, value = (each.transpose(1, 2).repeat_interleave(repeats, 1) for each in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)


def _stage(model: nn.Module, mesh: Mesh, plan: RunPlan, device: torch.device) -> PipelineStage:
    sizes, number = plan.config.model, mesh.pipeline_rank
    tokens = torch.empty(1, SEQUENCE, dtype=torch.int64, device=device)
    hidden, logits = (
        torch.empty(1, *shape, dtype=torch.bfloat16, device=device, requires_grad=True)
        for shape in ((SEQUENCE // TENSOR, sizes.hidden_size), (SEQUENCE, sizes.vocab_size))
    )
    return PipelineStage(
        model,
        number,
        PIPELINE,
        device,
        input_args=tokens if number == 0 else hidden,
        output_args=logits if number == PIPELINE - 1 else hidden,
        group=mesh.whole["pipeline"].get_group(),
    )


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh, device: torch.device) -> Any:
    """What the account wants to know of a rank."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return SimpleNamespace(
        stages=(model,),
        data_parallel=(SimpleNamespace(modules=units, zero_stage=2),),
        parameters=dict(model.named_parameters()),
        optimizer=optimizer,
        mesh=mesh,
        tied=None,
        device=device,
    )


def _following(
    model: nn.Module, optimizer: torch.optim.Optimizer, stage: PipelineStage, tokens: Tensor
) -> TensorTracker:
    """A tracker that knows what exists between steps."""
    tracker = TensorTracker()
    tracker.add([*model.parameters(), *model.buffers(), tokens])
    for state in optimizer.state.values():
        tracker.add(state.values())
    for received in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
        tracker.add(each.buffer for each in received)
    return tracker


KNOWN: tuple[tuple[int, str, float], ...] = ((0, "full", 20.40), (127, "full", 21.96), (0, "none", 46.33))
"""Rank, recomputation and GiB at the peak, counted with fake tensors and another tracker."""
OURS: dict[str, dict[str, Any]] = {
    "ours, stage 1": {"stage": 1},
    "ours": {},
    "ours, fused norms": {"device": "cuda"},
}
"""The engine's columns: as `declared` with these changes."""


def main() -> None:
    """Print what this program holds at its peak beside what the engine holds for the same plan, by category."""
    for rank, recompute, gib in KNOWN:
        (found,) = peaks(rank, recompute, BLOCKS)
        columns = {"torch": found.memory}
        for name, changes in OURS.items():
            with get_context("forkserver").Pool(1) as process:
                simulated = process.apply(simulate, (declared(recompute, **changes), rank))
            assert not simulated.failed_while, simulated.traceback
            columns[name] = simulated.memory
        print(f"rank {rank}, recompute {recompute}: {found.bytes / 2**30:.2f} GiB by the tracker, {gib} known")
        print(f"{'GiB':>12}", *(f"{name:>18}" for name in columns))
        for category in found.memory:
            print(f"{category:>12}", *(f"{memory[category] / 2**30:18.2f}" for memory in columns.values()))
        totals = (sum(memory.values()) for memory in columns.values())
        print(f"{'total':>12}", *(f"{total / 2**30:18.2f}" for total in totals), flush=True)


if __name__ == "__main__":
    main()
