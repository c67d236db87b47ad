"""What is checked on a GPU, one function a subject: each runs real trainings and gives figures and problems.

A figure is a measurement, a problem something that should not be. The same functions run on a CPU with tiny sizes in
the default tests, so that they do not rot; what only a GPU has is then left out and its figure is null.
"""

from __future__ import annotations

import gzip
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from orchestrator.tracking.rates import measured_pace, model_flops_utilization
from tests.gpu.alone import Trained, train
from tests.gpu.memory import memory
from tests.gpu.setting import TINY, Setting

CLOSE = 2e-4
"""Relative difference of FP32 losses between CPU and GPU that rounding explains over a few steps of a tiny model."""
CLOSE_BF16 = 3e-2


@dataclass
class Found:
    """What a check came to."""

    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note a problem unless it holds."""
        if not holds:
            self.problems.append(otherwise)


def speed(setting: Setting) -> Found:
    """BF16 steps of the large model, eager and compiled: tokens a second, MFU, attention kernel, peak memory."""
    found = Found()
    for compiled in setting.compile:
        name = "compiled" if compiled else "eager"
        words = setting.words(
            *setting.large,
            "training.precision=bf16_mixed",
            "training.steps=14",
            "training.profile_steps=[13,14]",
            f"training.compile={str(compiled).lower()}",
            "training.deterministic=false",
        )
        folder = setting.folder / f"speed-{name}"
        trained = train(words, folder)
        seconds, rate = measured_pace(trained.records[2:])
        kernels = attention_kernels(folder / "profile" / "rank-000.json.gz")
        memory_plan, time_plan = trained.plan.memory, trained.plan.time
        found.figures[name] = {
            "tokens_per_second": rate,
            "step_seconds": seconds,
            "first_step_seconds": trained.records[0]["step_seconds"],
            "mfu": model_flops_utilization(trained.plan, rate),
            "predicted_step_seconds": time_plan.step_seconds,
            "attention_kernels": kernels,
            "planned_peak_bytes": memory_plan.peak_bytes if memory_plan else None,
            **trained.device,
        }
        found.expect(plausible(trained), f"{name}: losses {trained.losses}")
        if setting.device == "cuda":
            flash = any("flash" in kernel or "fmha" in kernel for kernel in kernels)
            found.expect(flash, f"{name}: no FlashAttention kernel ran, but {kernels or 'none that is known'}")
    return found


def parity(setting: Setting) -> Found:
    """A tiny model on CPU and device, FP32 and BF16, plain and with ZeRO-3 and recompute: the same losses."""
    found = Found()
    on_cpu = Setting("cpu", setting.folder, ("cluster=local", "cluster.gpus_per_node=1"), TINY, (False,), "CPU")
    for precision, tolerance in (("fp32", CLOSE), ("bf16_mixed", CLOSE_BF16)):
        words = [*TINY, "training.steps=5", f"training.precision={precision}"]
        wanted = train(on_cpu.words(*words), setting.folder / f"parity-{precision}-cpu").losses
        for name, more in (
            ("plain", ()),
            ("ZeRO-3, recompute", ("parallel.zero_stage=3", "training.activation_checkpointing=full")),
        ):
            folder = setting.folder / f"parity-{precision}-{name.split(',')[0]}"
            losses = train(setting.words(*words, *more), folder).losses
            difference = max(abs(own - other) / other for own, other in zip(losses, wanted, strict=True))
            found.figures[f"{precision}, {name}"] = {"largest_relative_difference": difference}
            found.expect(difference <= tolerance, f"{precision}, {name}: losses {losses} against {wanted} on the CPU")
    return found


def fp16(setting: Setting) -> Found:
    """FP16 with its loss scale: plausible losses, a scale in every record, at most a few skipped steps."""
    words = setting.words(*TINY, "training.steps=12", "training.precision=fp16_mixed")
    trained = train(words, setting.folder / "fp16")
    scales = [record.get("loss_scale") for record in trained.records]
    skipped = sum(bool(record.get("skipped")) for record in trained.records)
    found = Found({"loss_scales": scales, "skipped_steps": skipped, "losses": trained.losses})
    found.expect(all(scales), f"steps without a loss scale: {scales}")
    found.expect(skipped <= 4, f"{skipped} of 12 steps overflowed")
    found.expect(plausible(trained), f"losses {trained.losses}")
    return found


def profiler(setting: Setting) -> Found:
    """A window of two steps: its trace holds exactly those, and on a GPU its kernels."""
    words = setting.words(*TINY, "training.steps=5", "training.precision=bf16_mixed", "training.profile_steps=[3,4]")
    folder = setting.folder / "profiler"
    trained = train(words, folder)
    events = trace_events(folder / "profile" / "rank-000.json.gz")
    steps = sorted({event["name"] for event in events if str(event.get("name", "")).startswith("step ")})
    kernels = sum(event.get("cat") == "kernel" for event in events)
    inside = median(record["step_seconds"] for record in trained.records if record.get("profiled"))
    outside = median(record["step_seconds"] for record in trained.records[1:] if not record.get("profiled"))
    found = Found({"kernels": kernels, "slower_inside": inside / outside, "steps": steps})
    found.expect(steps == ["step 3", "step 4"], f"the trace holds {steps}")
    found.expect(setting.device == "cpu" or kernels > 0, "the trace holds no GPU kernel")
    return found


def out_of_memory(setting: Setting) -> Found:
    """Memory runs out for real: the evidence names categories and plan, and on a GPU the snapshot can be read."""
    large = ("model.vocab_size=32768", "training.micro_batch_size=8")
    words = setting.words(*TINY, *large, "training.steps=3", "training.precision=fp32")
    limit = 8 * 2**20
    folder = setting.folder / "out-of-memory"
    trained = train(words, folder, memory_limit_bytes=limit)
    evidence = trained.evidence
    found = Found({"evidence": evidence})
    if evidence is None:
        found.problems.append(f"training went on within {limit / 2**20:.0f} MiB beside the model")
        return found
    found.expect(sum(evidence["categories"].values()) > 0, "nothing was measured")
    found.expect(sum(evidence["planned"].values()) > 0, "the plan's categories are missing")
    found.expect(Path(evidence["snapshot"]).exists(), f"there is no {evidence['snapshot']}")
    if setting.device == "cuda" and not found.problems:
        with Path(evidence["snapshot"]).open("rb") as file:
            snapshot = pickle.load(file)
        found.figures["snapshot_events"] = sum(map(len, snapshot["device_traces"]))
        found.expect(found.figures["snapshot_events"] > 0, "the snapshot holds no allocator events")
        found.expect(len(snapshot["segments"]) > 0, "the snapshot holds no segments")
    return found


def checkpoint(setting: Setting) -> Found:
    """Saved on the device, stopped, continued: the losses of the unbroken run, bit for bit."""
    words = setting.words(*TINY, "training.steps=6", "training.precision=bf16_mixed", "checkpoint.every_steps=2")
    unbroken = train(words, setting.folder / "checkpoint-unbroken")
    broken = setting.folder / "checkpoint-broken"
    train(words, broken, stop_at_step=4)
    continued = train(words, broken, attempt=2)
    resumed = [event["step"] for event in continued.events if event["kind"] == "resumed"]
    difference = max(
        (abs(own - other) for own, other in zip(continued.losses, unbroken.losses, strict=False)), default=None
    )
    found = Found({"resumed_after_step": resumed, "largest_difference": difference})
    found.expect(resumed == [3], f"it went on after step {resumed}, not 3")
    found.expect(continued.losses == unbroken.losses, f"losses {continued.losses} against {unbroken.losses}")
    return found


CHECKS: dict[str, Callable[[Setting], Found]] = {
    "parity": parity,
    "fp16": fp16,
    "checkpoint": checkpoint,
    "profiler": profiler,
    "out_of_memory": out_of_memory,
    "memory": lambda setting: Found(*memory(setting)),
    "speed": speed,
}
"""In the order in which they run: cheap ones that say that something is wrong come first."""


def plausible(trained: Trained) -> bool:
    """Whether every loss is near that of guessing: on random tokens nothing is learned and nothing explodes."""
    guessing = math.log(trained.plan.config.model.vocab_size)
    return all(abs(loss - guessing) < 1.0 for loss in trained.losses)


def trace_events(path: Path) -> list[dict[str, Any]]:
    """The events of a profiler trace."""
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


def attention_kernels(path: Path) -> list[str]:
    """Names of attention's kernels (on a CPU: operators) in a trace."""
    wanted = ("flash", "fmha", "attention", "cudnn_generated")
    names = {str(event.get("name", "")) for event in trace_events(path) if event.get("cat") in ("kernel", "cpu_op")}
    kernels = sorted(name for name in names if any(word in name.lower() for word in wanted))
    return [name[:120] for name in kernels][:12]
