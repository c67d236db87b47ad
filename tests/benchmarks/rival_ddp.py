"""The rival: a plain DistributedDataParallel loop as a practitioner would write it, started by torchrun.

Same model module, same samples in the same order, same optimizer, schedule, clipping, threads and precision as ours; no
checkpoint, no record. Prints one JSON line on rank 0.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.benchmarks.rival_ddp
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator

STARTED = time.time()

import numpy as np  # noqa: E402 - what is imported below counts as start-up
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as functional  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from models.llama.module import LlamaModel  # noqa: E402
from orchestrator.config.schema import ModelConfig  # noqa: E402
from orchestrator.data.dataset import RandomTokens  # noqa: E402
from orchestrator.data.order import SampleOrder, shard  # noqa: E402
from tests.benchmarks.workload import Workload  # noqa: E402


def main() -> None:
    """Train and print when each step ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", help="write a torch.profiler table of steady steps to this file")
    load, arguments = Workload.from_arguments(parser)
    imported = time.time()
    torch.set_num_threads(load.threads)
    dist.init_process_group("gloo")
    joined = time.time()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build_model(load)
    parallel = DistributedDataParallel(model)
    optimizer = build_optimizer(model, load)
    dataset = RandomTokens(load.seed, "train", load.vocab_size, load.sequence_length)
    order = SampleOrder(load.seed, len(dataset))
    built = time.time()
    ended, cpu, losses = [], [], []
    with profiled(arguments.profile if rank == 0 else None, load) as next_step:
        for step in range(1, load.steps + 1):
            ids = shard(order.ids(step, load.global_batch_size), rank, ranks, load.micro_batch_size)
            losses.append(train_step(parallel, optimizer, load, dataset.sample(ids[0]), step))
            ended.append(time.time())
            cpu.append(time.process_time())
            next_step()
    if rank == 0:
        marks = {"started": STARTED, "imported": imported, "process group": joined, "built": built}
        found = {"marks": marks, "ended": ended, "cpu": cpu, "loss": losses[-1], "first_loss": losses[0]}
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that exits normally


def build_model(load: Workload) -> LlamaModel:
    """The model with its usual random weights, the same on every rank."""
    sizes = ModelConfig(
        hidden_size=load.hidden_size,
        intermediate_size=load.intermediate_size,
        num_hidden_layers=load.num_hidden_layers,
        num_attention_heads=load.num_attention_heads,
        vocab_size=load.vocab_size,
        max_position_embeddings=load.sequence_length,
    )
    model = LlamaModel(sizes).to_empty(device="cpu")
    torch.manual_seed(load.seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    model.initialise_buffers()
    return model


def build_optimizer(model: LlamaModel, load: Workload) -> torch.optim.Optimizer:
    """Fused AdamW, weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": load.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=load.lr, betas=(0.9, 0.95), fused=True)


def train_step(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, load: Workload, rows: np.ndarray, step: int
) -> float:
    """One optimizer step over this rank's sequences [n, s + 1]; returns its own mean loss."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(load, step)
    tokens = torch.from_numpy(rows)
    autocast = torch.autocast("cpu", torch.bfloat16) if load.precision == "bf16_mixed" else contextlib.nullcontext()
    with autocast:
        logits = model(tokens[:, :-1])
    loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), load.gradient_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


def learning_rate(load: Workload, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step <= load.warmup_steps:
        return load.lr * step / load.warmup_steps
    progress = (step - load.warmup_steps) / max(1, load.steps - load.warmup_steps)
    return load.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


@contextlib.contextmanager
def profiled(path: str | None, load: Workload) -> Iterator[Callable[[], None]]:
    """Profile the steps after the warm ones, if a path is given; yields what to call after each step."""
    if path is None:
        yield lambda: None
        return
    from tests.benchmarks.profile_table import write_table

    schedule = torch.profiler.schedule(wait=load.warm_steps, warmup=1, active=load.steps - load.warm_steps - 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as profiler:
        yield profiler.step
    write_table(profiler, path, load.steps - load.warm_steps - 1)


if __name__ == "__main__":
    main()
