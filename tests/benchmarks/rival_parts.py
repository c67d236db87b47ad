"""What every rival's loop shares: model, optimizer, learning rate, random tokens, and the loop around its own step.

As a practitioner would write it, in plain torch; of this project only the model's module is used (`models/`, so that
all sides compute the same) and nothing of `orchestrator/`. A rival is one function from workload to step:
`rival_ddp.py`, `rival_fsdp.py`, `rival_deepspeed.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace

STARTED = time.time()

import numpy as np  # noqa: E402 - what is imported below counts as start-up
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as functional  # noqa: E402

from models.llama.module import LlamaModel  # noqa: E402
from tests.benchmarks.gate import Gate  # noqa: E402
from tests.benchmarks.workload import Workload  # noqa: E402

Step = Callable[[list[torch.Tensor], float], float]
"""(micro-batches [n, s + 1] of this rank, learning rate) -> this rank's own mean loss."""


def run(make_step: Callable[[Workload], Step], description: str | None) -> None:
    """Live as one rank: build with `make_step`, train, print when each step ended (rank 0)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--profile", help="write a torch.profiler table of steady steps to this file")
    load, arguments = Workload.from_arguments(parser)
    imported = time.time()
    torch.set_num_threads(load.threads)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    joined, rank = time.time(), dist.get_rank()
    train_step = make_step(load)
    gate, built = Gate(rank), time.time()
    ended, cpu, losses = [], [], []
    with profiled(arguments.profile if rank == 0 else None, load) as next_step:
        step = 0
        while gate.driven or step < load.steps:
            gate.wait(losses[-1] if losses else None)
            step += 1
            losses.append(train_step(micro_batches(load, rank, step), learning_rate(load, step)))
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
    sizes = SimpleNamespace(
        family="llama",
        hidden_size=load.hidden_size,
        intermediate_size=load.intermediate_size,
        num_hidden_layers=load.num_hidden_layers,
        num_attention_heads=load.num_attention_heads,
        num_key_value_heads=None,
        head_dim=None,
        vocab_size=load.vocab_size,
        max_position_embeddings=load.sequence_length,
        rope_theta=10000.0,
        rope_scaling=None,
        sliding_window=None,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        attention_bias=None,
        attention_output_bias=None,
        attention_dropout=0.0,
        resid_pdrop=0.0,
        initializer_range=0.02,
    )
    model = LlamaModel(sizes).to_empty(device="cpu")
    torch.manual_seed(load.seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    model.initialise_buffers()
    return model


def build_optimizer(parameters: Iterable[torch.nn.Parameter], load: Workload) -> torch.optim.Optimizer:
    """Fused AdamW, weight decay on matrices only."""
    parameters = list(parameters)
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": load.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=load.lr, betas=(0.9, 0.95), fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def autocast(load: Workload) -> contextlib.AbstractContextManager[object]:
    """BF16 where the workload says so."""
    if load.precision == "bf16_mixed":
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token, in FP32."""
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def micro_batches(load: Workload, rank: int, step: int) -> list[torch.Tensor]:
    """This rank's random tokens of a step, [micro-batch, sequence + 1] each."""
    generator = np.random.default_rng((load.seed, step, rank))
    shape = (load.micro_batches, load.micro_batch_size, load.sequence_length + 1)
    return list(torch.from_numpy(generator.integers(0, load.vocab_size, shape)))


def learning_rate(load: Workload, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step <= load.warmup_steps:
        return load.lr * step / load.warmup_steps
    progress = min(1.0, (step - load.warmup_steps) / max(1, load.steps - load.warmup_steps))
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
