"""The rival for sharded plans: an FSDP2 loop written by hand, ZeRO-2 or ZeRO-3 by `--zero_stage`, plain torch.

One unit for the embedding, each block, and final norm with head; prefetch and mixed precision as FSDP2 has them. With
accumulation it keeps weights (stage 2) or gathers them for each micro-batch (stage 3), as the names promise.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.benchmarks.rival_fsdp --zero_stage 3
"""

from __future__ import annotations

from tests.benchmarks import rival_parts as parts

import torch  # isort: skip  # what is imported counts as start-up, whose clock `rival_parts` starts
import torch.distributed as dist  # isort: skip
from torch.distributed.device_mesh import init_device_mesh  # isort: skip
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # isort: skip


def make_step(load: parts.Workload) -> parts.Step:
    """FSDP2 over all ranks."""
    model = parts.build_model(load)
    policy = MixedPrecisionPolicy()
    if load.precision == "bf16_mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": load.zero_stage == 3}
    for unit in (model.embedding, *model.layers.values(), [model.norm, model.head]):
        fully_shard(unit, **options)  # type: ignore[arg-type]
    fully_shard(model, **options)  # type: ignore[arg-type]
    optimizer = parts.build_optimizer(model.parameters(), load)

    def step(batches: list[torch.Tensor], rate: float) -> float:
        parts.set_rate(optimizer, rate)
        total = 0.0
        for index, tokens in enumerate(batches):
            model.set_reshard_after_backward(load.zero_stage == 3 or index == len(batches) - 1)
            loss = parts.loss_of(model(tokens[:, :-1]), tokens) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), load.gradient_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


if __name__ == "__main__":
    parts.run(make_step, __doc__)
