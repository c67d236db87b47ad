"""Ours against a plain torchrun DDP loop: tokens a second, and seconds from the command to the first optimizer step.

Each round runs every contestant once, in an order that turns from round to round, so that what else the machine does
falls on all alike; reported are medians, and the median of the ratios within a round. Everything stays on loopback.
Contestants: `rival`, the plain loop; `rival_malloc`, the same with our setting of glibc's malloc; `engine`, our ranks
started by torchrun, without Ray; `ours`, the full command.

    python -m tests.benchmarks.ddp                                  # the full command, FP32 and BF16, 7 rounds
    python -m tests.benchmarks.ddp --rounds 3 --contestants rival engine --precisions fp32
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.benchmarks.workload import Workload

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
CONTESTANTS = ("rival", "rival_malloc", "engine", "ours")
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
"""`orchestrator/engine/allocator.py` as variables for a process that does not call it."""
TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class Run:
    """What one run of one contestant came to."""

    contestant: str
    precision: str
    seconds_to_first_step: float
    """From before its process was started to the end of its first optimizer step."""
    tokens_per_second: float
    """Over the steps after the warm ones and before the last, by the clock: all that happens between them counts."""
    cpu_seconds_per_step: float | None
    """Processor time of rank 0 in such a step, all threads; None where it is not told."""
    first_loss: float
    last_loss: float
    load_before: float
    """Load average of the machine when it began: above 1 or so, others were computing."""
    parts: dict[str, float] = field(default_factory=dict)
    """Where the seconds to the first step went."""


def main() -> None:
    """Run the rounds, print the table and write everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=["rival", "ours"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16_mixed"])
    parser.add_argument("--output", type=Path, default=Path("ddp_benchmark.json"))
    load, arguments = Workload.from_arguments(parser)
    runs: list[Run] = []
    for precision in arguments.precisions:
        for round_ in range(arguments.rounds):
            turn = round_ % len(arguments.contestants)
            for contestant in arguments.contestants[turn:] + arguments.contestants[:turn]:
                run = measure(contestant, replace(load, precision=precision))
                runs.append(run)
                print(line(run), flush=True)
    arguments.output.write_text(
        json.dumps({"workload": asdict(load), "machine": machine(), "runs": [asdict(run) for run in runs]}, indent=1),
        encoding="utf-8",
    )
    for precision in arguments.precisions:
        print(table([run for run in runs if run.precision == precision], arguments.contestants))
    print(f"All runs: {arguments.output}")


def measure(contestant: str, load: Workload) -> Run:
    """One run; raises RuntimeError with the end of its output when it fails."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        command = [sys.executable, *_command(contestant, load, folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(load.threads), "GLOO_SOCKET_IFNAME": "lo"}
        if contestant == "rival_malloc":
            environment |= KEEP_FREED_MEMORY
        started = time.time()
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{contestant} failed ({done.returncode}):\n{(done.stdout + done.stderr)[-4000:]}")
        found = _read_run(Path(folder) / "benchmark") if contestant == "ours" else _last_json(done.stdout)
    ended, tokens = found["ended"], load.global_batch_size * load.sequence_length
    steady = len(ended) - 1 - load.warm_steps
    if steady < 2:
        raise ValueError(f"{load.steps} steps leave too few to measure after {load.warm_steps} warm ones")
    cpu = found.get("cpu")
    return Run(
        contestant=contestant,
        precision=load.precision,
        seconds_to_first_step=ended[0] - started,
        tokens_per_second=tokens * steady / (ended[-2] - ended[load.warm_steps - 1]),
        cpu_seconds_per_step=(cpu[-2] - cpu[load.warm_steps - 1]) / steady if cpu else None,
        first_loss=found["first_loss"],
        last_loss=found["loss"],
        load_before=load_before,
        parts=_parts(found, started),
    )


def _command(contestant: str, load: Workload, folder: str) -> list[str]:
    if contestant == "ours":
        return ["-m", "orchestrator", *load.overrides(folder)]
    if contestant == "engine":
        own = Path(folder) / "benchmark"
        own.mkdir()
        ranks = ["tests.benchmarks.engine_ranks", f"--run_directory={own}"]
    else:
        ranks = ["tests.benchmarks.rival_ddp"]
    return [*TORCHRUN, str(load.ranks), "-m", *ranks, *load.arguments()]


def _last_json(output: str) -> dict[str, Any]:
    """The JSON line that rank 0 prints."""
    lines = [text for text in output.splitlines() if text.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _read_run(folder: Path) -> dict[str, Any]:
    """The same from the record that our command leaves."""
    records = [json.loads(text) for text in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {
        "ended": [record["time"] for record in records],
        "first_loss": records[0]["loss"],
        "loss": records[-1]["loss"],
        "timings": summary.get("start_seconds", {}),
    }


def _parts(found: dict[str, Any], started: float) -> dict[str, float]:
    """Seconds to the first step, divided: our command tells them; a script's marks become differences."""
    if "marks" not in found:
        return dict(found["timings"])
    marks = sorted({**found["marks"], "first step": found["ended"][0]}.items(), key=lambda mark: mark[1])
    marks = [mark for mark in marks if mark[1] <= found["ended"][0]]
    before = [started, *(moment for _, moment in marks)]
    return {name: moment - earlier for (name, moment), earlier in zip(marks, before, strict=False)}


def line(run: Run) -> str:
    """A run as a line of progress."""
    return (
        f"{run.precision:>10} {run.contestant:>7}: {run.tokens_per_second:8,.0f} tokens/s, first step after "
        f"{run.seconds_to_first_step:5.1f} s, loss {run.first_loss:.3f} -> {run.last_loss:.3f}, "
        f"load {run.load_before:.1f}"
    )


def table(runs: Sequence[Run], contestants: Sequence[str]) -> str:
    """Medians by contestant, and ratios to the rival's run of the same round."""
    by_name = {name: [run for run in runs if run.contestant == name] for name in contestants}
    rows = [f"\n{runs[0].precision}: medians of {len(by_name[contestants[0]])} rounds (smallest to largest)"]
    for name, own in by_name.items():
        speed, first = (
            _spread([run.tokens_per_second for run in own]),
            _spread([run.seconds_to_first_step for run in own]),
        )
        rows.append(f"  {name:>7}: {speed:>28} tokens/s   first step {first:>20} s{_ratios(own, by_name.get('rival'))}")
    for name, own in by_name.items():
        parts = {part: statistics.median(run.parts.get(part, 0.0) for run in own) for part in own[0].parts}
        rows.append(f"  {name:>7}: " + ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items()))
    return "\n".join(rows)


def _ratios(own: Sequence[Run], rival: Sequence[Run] | None) -> str:
    if not rival or own is rival:
        return ""
    speed = statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in zip(own, rival, strict=True))
    first = statistics.median(
        a.seconds_to_first_step / b.seconds_to_first_step for a, b in zip(own, rival, strict=True)
    )
    text = f"   x {speed:.3f} in tokens/s, x {first:.2f} in seconds"
    cpu = [
        a.cpu_seconds_per_step / b.cpu_seconds_per_step
        for a, b in zip(own, rival, strict=True)
        if a.cpu_seconds_per_step and b.cpu_seconds_per_step
    ]
    return text + (f", x {statistics.median(cpu):.3f} in processor time a step" if cpu else "")


def _spread(values: Sequence[float]) -> str:
    digits = 0 if values[0] >= 100 else 1
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def machine() -> dict[str, Any]:
    """What it was measured on."""
    import torch

    return {"cores": os.cpu_count(), "python": sys.version.split()[0], "torch": torch.__version__, "time": time.time()}


if __name__ == "__main__":
    main()
