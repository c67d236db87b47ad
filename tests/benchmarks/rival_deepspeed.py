"""The rival for sharded plans: DeepSpeed's engine, stage by `--zero_stage`, in an environment of its own (README).

FP32, or BF16 parameters with DeepSpeed's own FP32 master weights; torch's fused AdamW over its partitions, which is
faster on a CPU than its own. Started with DeepSpeed's Python:

    DEEPSPEED_PYTHON -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.benchmarks.rival_deepspeed
"""

from __future__ import annotations

import os

from tests.benchmarks import rival_parts as parts

import torch  # isort: skip  # what is imported counts as start-up, whose clock `rival_parts` starts

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed  # type: ignore[import-not-found]  # isort: skip


def make_step(load: parts.Workload) -> parts.Step:
    """DeepSpeed ZeRO over all ranks, gloo."""
    model = parts.build_model(load)
    optimizer = parts.build_optimizer(model.parameters(), load)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": load.micro_batch_size,
            "gradient_accumulation_steps": load.micro_batches,
            "gradient_clipping": load.gradient_clip,
            "bf16": {"enabled": load.precision == "bf16_mixed"},
            "zero_optimization": {"stage": load.zero_stage, "overlap_comm": False},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
    )

    def step(batches: list[torch.Tensor], rate: float) -> float:
        parts.set_rate(engine.optimizer, rate)
        total = 0.0
        for tokens in batches:
            loss = parts.loss_of(engine(tokens[:, :-1]), tokens)
            engine.backward(loss)
            engine.step()
            total += loss.item() / len(batches)
        return total

    return step


if __name__ == "__main__":
    parts.run(make_step, __doc__)
