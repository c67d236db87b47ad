"""What stands in for what a laptop does not have, while the engine's own code runs: the whole list, in one place.

`DIFFERENCES` says in words how a simulated step differs from a real one; `stand_ins` does it. Nothing else of the
engine knows that it is simulated. Next: `dryrun.py`, which runs a step inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, Work, _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.pipelining.stage import InferenceMode  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.futures import Future
from torch.nn import functional
from torch.optim import optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.engine import build, data_parallel, step
from orchestrator.plan.run_plan import RunPlan

DIFFERENCES: tuple[str, ...] = (
    "The other ranks: a process group that answers every collective at once, without data.",
    "Memory and arithmetic: tensors with shape, type and lifetime but without numbers. Shapes, refusals, what is kept "
    "and for how long are the engine's own.",
    "Initial weights are not drawn, samples are zeros, loss and gradient norm are taken as 1.",
    "Kernels of a GPU stand for what they keep: a fused RMSNorm its input and a number a row; FlashAttention its "
    "inputs, its output and a number a row and head.",
    "With offload, what a GPU would hold of the states for the time of a copy from or to the host is held as well.",
    "Pipeline ranks do not ask each other for shapes before the first step: the plan's own are used.",
    "training.compile is left out: the engine's eager kernels run, which keep the same or more.",
    "The allocator's rounding and fragmentation, CUDA context and NCCL's own buffers are no tensors: the reserve "
    "stands for them.",
    "Data loading, validation, checkpoints and logging are left out; none holds more on the device than a step.",
)
"""How a simulated step differs from a real one."""


@contextmanager
def stand_ins(plan: RunPlan, rank: int) -> Iterator[torch.device]:
    """Inside, `build` and `train_step` of this process are those of `rank` of the plan, without any other rank.

    Gives the device to build on, whose tensors have no numbers. Raises RuntimeError if the process has a process group
    already.
    """
    assert plan.parallel is not None, "a plan without degrees has no ranks"
    offload = plan.config.parallel.offload == "all"
    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=rank, world_size=plan.parallel.world_size)
    try:
        with ExitStack() as entered:
            for place, name, instead in _replaced(on_gpu=plan.config.cluster.device == "cuda", offload=offload):
                entered.enter_context(patch.object(place, name, instead))
            entered.enter_context(patch.object(torch, "meta", _Streams, create=True))
            entered.enter_context(_Answers())  # type: ignore[no-untyped-call]
            yield torch.device("meta")
    finally:
        dist.destroy_process_group()


def _replaced(*, on_gpu: bool, offload: bool) -> Iterator[tuple[Any, str, Any]]:
    """(where, name, what stands there instead) of everything that is replaced."""
    yield build, "allocate", _on_one_device(build.allocate)
    yield build, "initialise", _nothing
    yield build, "apply_compile", _nothing
    yield step, "read", _read
    yield optimizer, "_get_fused_kernels_supported_devices", lambda: ["meta"]
    yield _PipelineSchedule, "_warmup_p2p", _agree
    yield torch.accelerator, "current_stream", _Streams.current_stream
    for module in (_fully_shard, replicate_with_fsdp):
        yield module, "_get_device_from_mesh", lambda mesh: torch.device("meta")
    yield FSDPParamGroup, "_validate_no_meta_params", _nothing
    yield FSDPParamGroup, "_validate_cpu_offload_params", _nothing
    attention = gpu_attention if on_gpu else cpu_attention
    yield functional, "scaled_dot_product_attention", attention
    if on_gpu:
        yield data_parallel, "BUCKET_BYTES", {"cpu": data_parallel.BUCKET_BYTES["cuda"]}
        yield functional, "rms_norm", rms_norm
        if offload:
            yield FSDPParam, "all_gather_inputs", property(_copied_from_host)


class _Passed:
    """A stream or an event of a device that is never behind."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, *_: Any) -> _Passed:
        return self

    record = record_event

    def wait_event(self, *_: Any) -> None:
        pass

    wait_stream = synchronize = wait = wait_event


class _Streams:
    """What FSDP asks of its device's module."""

    Stream = Event = _Passed

    @staticmethod
    def current_stream() -> _Passed:
        return _Passed()

    @staticmethod
    def stream(_: Any) -> AbstractContextManager[None]:
        return nullcontext()


class _Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers every collective at once; what is copied to the host stays a tensor without numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func.namespace == "c10d":
            work = _holding(args[0]).boxed() if func.overloadpacket.__name__ == "send" else FakeWork().boxed()
            return work if len(func._schema.returns) == 1 else (args[0], work)
        if func is torch.ops.aten._to_copy.default and args[0].is_meta:
            options = {**options, "device": torch.device("meta")}
        return func(*args, **options)


def _holding(tensors: list[Tensor]) -> Work:
    """What stands for a send that is under way: its tensors live until it is waited for and dropped."""
    done: Future[list[Tensor]] = Future()
    done.set_result(tensors)
    work: Work = _create_work_from_future(done)
    return work


def _on_one_device(allocate: Callable[..., None]) -> Callable[..., None]:
    def allocate_without_numbers(stage: Any, device: torch.device, *, offload: bool) -> None:
        allocate(stage, device, offload=False)

    return allocate_without_numbers


def _nothing(*_: Any, **__: Any) -> None:
    """In place of what has no effect on shapes and bytes."""


def _read(values: Tensor) -> list[float]:
    return [1.0] * values.numel()


def _agree(_: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


def gpu_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
    """The FlashAttention kernel of a GPU, by its own name: what it keeps and makes."""
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, options.get("dropout_p", 0.0), options.get("is_causal", False)
    )[0]
    return output


def cpu_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
    """The FlashAttention kernel of a CPU, by its own name."""
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, options.get("dropout_p", 0.0), options.get("is_causal", False), attn_mask=attn_mask
    )[0]
    return output


_ALL_GATHER_INPUTS: Any = vars(FSDPParam)["all_gather_inputs"].fget


def _copied_from_host(held: FSDPParam) -> list[Tensor]:
    inputs: list[Tensor] = _ALL_GATHER_INPUTS(held)
    if not held.offload_to_cpu:
        return inputs
    # On a GPU the shard is copied over before it is cast; where nothing is cast, the copy itself is handed on.
    held._sharded_param_data.clone()
    own = held._sharded_param_data.untyped_storage()._cdata
    return [each.clone() if each.untyped_storage()._cdata == own else each for each in inputs]


def rms_norm(value: Tensor, shape: tuple[int, ...], weight: Tensor, eps: float | None = None) -> Tensor:
    """What a GPU's fused RMSNorm keeps and makes, for the tensors' lifetimes only."""
    if not isinstance(value, DTensor):
        return _FusedRmsNorm.apply(value, weight)  # type: ignore[no-any-return, no-untyped-call]
    mesh, placements = value.device_mesh, value.placements
    whole = isinstance(weight, DTensor)
    partial: list[Placement] = [Partial() if placement.is_shard() else placement for placement in placements]
    own = weight.to_local(grad_placements=partial) if whole else weight  # type: ignore[attr-defined]
    normed = _FusedRmsNorm.apply(value.to_local(), own)  # type: ignore[no-untyped-call]
    return DTensor.from_local(normed, mesh, placements, run_check=False)


class _FusedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, weight: Tensor) -> Tensor:
        inverse = value.new_empty((*value.shape[:-1], 1), dtype=torch.float32)
        context.save_for_backward(value, weight, inverse)
        return torch.empty_like(value)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        value, weight, _ = context.saved_tensors
        return torch.empty_like(value), torch.empty_like(weight)
