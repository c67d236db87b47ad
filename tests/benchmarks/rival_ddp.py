"""The rival: a plain DistributedDataParallel loop as a practitioner would write it, started by torchrun.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.benchmarks.rival_ddp
"""

from __future__ import annotations

import contextlib

from tests.benchmarks import rival_parts as parts

import torch  # isort: skip  # what is imported counts as start-up, whose clock `rival_parts` starts
from torch.nn.parallel import DistributedDataParallel  # isort: skip


def make_step(load: parts.Workload) -> parts.Step:
    """DDP with its default buckets; with accumulation, one reduction a step."""
    model = parts.build_model(load)
    parallel = DistributedDataParallel(model)
    optimizer = parts.build_optimizer(model.parameters(), load)

    def step(batches: list[torch.Tensor], rate: float) -> float:
        parts.set_rate(optimizer, rate)
        total = 0.0
        for index, tokens in enumerate(batches):
            last = index == len(batches) - 1
            with contextlib.nullcontext() if last else parallel.no_sync():
                with parts.autocast(load):
                    logits = parallel(tokens[:, :-1])
                loss = parts.loss_of(logits, tokens) / len(batches)
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), load.gradient_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


if __name__ == "__main__":
    parts.run(make_step, __doc__)
