"""Checkpoints against `torch.save`, plain DCP and the disk itself, on the same state: blocked time, save, load.

    python -m tests.benchmarks.checkpoint [--mib 512] [--rounds 7] [--ranks 2] [--directory DIR] [--json]

A state like a small LLaMA's (weights and two moments of every parameter, counters) of `--mib` in each of `--ranks`
gloo processes. Every round does each of these once, in turn, and what is printed are medians over rounds:

  copy        the state into memory that is there already (what a step waits for at least), before and after the next
  blocked     time that `CheckpointWriter.save` keeps the step waiting, writing in the background
  disk        the same bytes from memory into one new file a rank, in pieces of 8 MiB, then fsync
  disk, best  as `disk`, with room reserved and every piece sent on its way at once: how `write` writes, and no more;
              like `disk` both before and after `write`
  write       `checkpoint.write.save`: shards, checksums, fsync of every file, manifest, rename
  torch.save  `torch.save` of the rank's state into one file a rank, then fsync; no checksums
  DCP         `torch.distributed.checkpoint.save`, its own writer with fsync; no checksums
  load …      the same three, from the page cache where the system kept it; ours with and without verifying

All ranks do the same at the same time, and what counts is the slowest. Targets of ours, as times: blocked at most
1.3 x copy, write at most 1.25 x disk. Ratios are medians of those within a round, with their quartiles: what else the
machine does falls on both sides of each. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import load as load_plain
from torch.distributed.checkpoint import save as save_plain

from orchestrator.checkpoint.folder import open_checkpoint
from orchestrator.checkpoint.read import load
from orchestrator.checkpoint.storage import LocalFolder
from orchestrator.checkpoint.store import CheckpointWriter
from orchestrator.checkpoint.write import save
from tests.core.run_cases import manifest_of
from tests.engine.gloo import on_ranks

_PIECE_BYTES = 8 << 20
State = dict[str, dict[str, torch.Tensor]]


def state_of(rank: int, size_bytes: int) -> State:
    """Weights, moments and counters of one rank: 12 bytes a parameter, tensors as a LLaMA block has them."""
    hidden = 1024
    shapes = [(hidden, hidden), (hidden // 4, hidden), (4 * hidden, hidden), (hidden, 4 * hidden), (hidden,)]
    left, number = size_bytes // 12, 0
    state: State = {"model": {}, "optimizer": {}}
    while left > 0:
        shape = shapes[number % len(shapes)]
        name = f"rank{rank}.layers.{number}.weight"
        weight = torch.randn(shape)
        left -= weight.numel()
        number += 1
        state["model"][name] = weight
        state["optimizer"][f"{name}.exp_avg"] = torch.randn(shape)
        state["optimizer"][f"{name}.exp_avg_sq"] = torch.rand(shape)
        state["optimizer"][f"{name}.step"] = torch.tensor(float(number))
    return state


def tensors_of(state: State) -> list[torch.Tensor]:
    return [tensor for part in state.values() for tensor in part.values()]


def write_to_disk(path: Path, state: State) -> None:
    """The state's bytes, as fast as the disk takes them from one thread."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    for tensor in tensors_of(state):
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(data), _PIECE_BYTES):
            os.write(descriptor, data[begin : begin + _PIECE_BYTES])
    os.fsync(descriptor)
    os.close(descriptor)


def write_at_best(folder: Path, name: str, state: State) -> None:
    """The state's bytes through the sink that checkpoints use, without checksums, metadata and names."""
    sink = LocalFolder(folder).create(name, sum(tensor.nbytes for tensor in tensors_of(state)))
    for tensor in tensors_of(state):
        data = tensor.reshape(-1).view(torch.uint8).numpy().data
        for begin in range(0, len(data), _PIECE_BYTES):
            sink.write([data[begin : begin + _PIECE_BYTES]])
    sink.close()


def torch_save(path: Path, state: State) -> None:
    with path.open("xb") as stream:
        torch.save(state, stream)
        stream.flush()
        os.fsync(stream.fileno())


class Bench:
    """The things to be timed, on one rank; each leaves its files for the ones that read them."""

    def __init__(self, rank: int, folder: Path, size_bytes: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        self.rank, self.folder = rank, folder
        self.state = state_of(rank, size_bytes)
        self.target = {part: {name: torch.zeros_like(t) for name, t in v.items()} for part, v in self.state.items()}
        self.copied = [torch.zeros_like(tensor) for tensor in tensors_of(self.state)]
        self.writer = CheckpointWriter(folder / "async", 1, asynchronous=True)
        self.blocked: list[float] = []
        self.step = 0

    def copy(self) -> None:
        for target, tensor in zip(self.copied, tensors_of(self.state), strict=True):
            target.copy_(tensor)

    def block(self) -> None:
        self.writer.save(self.step, self.state, manifest_of(self.step))

    def settle(self) -> None:
        self.writer.wait()
        self.blocked += [outcome.blocked_seconds for outcome in self.writer.take_outcomes()]

    def disk(self) -> None:
        write_to_disk(self.folder / f"disk-{self.rank}-{uuid.uuid4().hex}", self.state)

    def disk_at_best(self) -> None:
        write_at_best(self.folder, f"disk-best-{self.rank}-{uuid.uuid4().hex}", self.state)

    def write(self) -> None:
        save(self.folder / "ours", self.step, self.state, manifest_of(self.step))

    def torch_save(self) -> None:
        torch_save(self.folder / f"torch-{self.rank}", self.state)

    def plain(self) -> None:
        save_plain(self.state, storage_writer=FileSystemWriter(self.folder / "plain", sync_files=True))

    def load_ours(self, verify: bool) -> None:
        load(open_checkpoint(self.folder / "ours" / f"step-{self.step:08d}"), self.target, verify=verify)

    def load_torch(self) -> None:
        loaded = torch.load(self.folder / f"torch-{self.rank}", weights_only=True)
        for part, values in loaded.items():
            for name, tensor in values.items():
                self.target[part][name].copy_(tensor)

    def load_plain(self) -> None:
        load_plain(self.target, storage_reader=FileSystemReader(self.folder / "plain"))

    def clear(self) -> None:
        if self.rank == 0:
            for name in ("disk-*", "torch-*"):
                for path in self.folder.glob(name):
                    path.unlink()
            for name in ("ours", "plain"):
                shutil.rmtree(self.folder / name, ignore_errors=True)


def run(rank: int, world: int, folder: Path, size_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round by name, of the slowest rank; the first round warms up and does not count.

    What a round does twice counts with its mean.
    """
    bench = Bench(rank, folder, size_bytes)
    actions: list[tuple[str, Callable[[], None]]] = [
        ("copy", bench.copy),
        ("blocked", bench.block),
        ("", bench.settle),
        ("copy", bench.copy),
        ("disk, best", bench.disk_at_best),
        ("disk", bench.disk),
        ("write", bench.write),
        ("disk", bench.disk),
        ("disk, best", bench.disk_at_best),
        ("torch.save", bench.torch_save),
        ("DCP", bench.plain),
        ("load", lambda: bench.load_ours(verify=False)),
        ("load verified", lambda: bench.load_ours(verify=True)),
        ("load torch.save", bench.load_torch),
        ("load DCP", bench.load_plain),
    ]
    times: dict[str, list[float]] = {name: [] for name, _ in actions if name}
    for bench.step in range(1, rounds + 2):
        round_times: dict[str, list[float]] = {name: [] for name in times}
        for name, action in actions:
            os.sync()
            dist.barrier()
            started = time.perf_counter()
            action()
            seconds = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if name:
                round_times[name].append(float(seconds))
        if bench.step > 1:
            for name, seconds_of_round in round_times.items():
                times[name].append(statistics.fmean(seconds_of_round))
        dist.barrier()
        bench.clear()
        dist.barrier()
    bench.writer.close()
    equal = all(torch.equal(a, b) for a, b in zip(tensors_of(bench.target), tensors_of(bench.state), strict=True))
    assert equal, "what was loaded last is not what was saved"
    return times


def summary(times: dict[str, list[float]], size_bytes: int) -> dict[str, Any]:
    """Medians, rates, and ratios of times as (lower quartile, median, upper quartile) over the rounds."""
    medians = {name: statistics.median(values) for name, values in times.items()}

    def ratio(one: str, other: str) -> list[float]:
        by_round = [a / b for a, b in zip(times[one], times[other], strict=True)]
        return statistics.quantiles(by_round, n=4) if len(by_round) > 1 else by_round * 3

    return {
        "gib": size_bytes / 2**30,
        "seconds": medians,
        "gib_per_second": {name: size_bytes / 2**30 / seconds for name, seconds in medians.items()},
        "blocked_to_copy": ratio("blocked", "copy"),
        "write_to_disk": ratio("write", "disk"),
        "write_to_disk_at_best": ratio("write", "disk, best"),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="state of each rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--directory", help="where to write; the system's temporary folder if left out")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-benchmark-", dir=asked.directory))
    try:
        (times, *_) = on_ranks(asked.ranks, run, folder, asked.mib << 20, asked.rounds, limit_seconds=3600)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = summary(times, asked.ranks * asked.mib << 20)
    if asked.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"{asked.ranks} ranks, {found['gib']:.2f} GiB together, medians of {asked.rounds} rounds")
    for name, seconds in found["seconds"].items():
        print(f"  {name:<16}{seconds:8.3f} s  {found['gib_per_second'][name]:6.2f} GiB/s")
    for what, key, target in (
        ("blocked / copy", "blocked_to_copy", "at most 1.3"),
        ("write / disk", "write_to_disk", "at most 1.25"),
        ("write / disk, best", "write_to_disk_at_best", "none"),
    ):
        lower, median, upper = found[key]
        print(f"{what:<20}{median:5.2f} x its time ({lower:.2f} to {upper:.2f}; target: {target})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
