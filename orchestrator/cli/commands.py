"""The commands that exist, one line each. A command is a module with `HELP`, `FLAGS` and `run(invocation)`.

Modules are imported when their command is typed, so that `plan` never waits for what `train` needs.
"""

from __future__ import annotations

from importlib import import_module, util
from typing import Protocol, cast

from orchestrator.cli.invocation import Invocation

SUMMARIES = {
    "train": "plan, check, place and run the training (also when no command is given)",
    "plan": "what the training would need and cost: layout, memory, time, every problem; starts nothing",
    "search": "every legal plan for this model on these GPUs, ranked",
    "dryrun": "the engine's own step for one rank of each kind, without GPUs: exact tensor memory, traffic, FLOPs",
    "verify": "prove on CPU processes that the plan, made small, is the same training as one process",
    "compare": "runs side by side from MLflow: plan, loss, pace, memory, predicted beside measured",
    "checkpoint": "list, verify, export and import checkpoints; Hugging Face weights in and out",
    "inventory": "what the live Ray cluster has, and its declaration as conf/cluster/NAME.yaml",
    "submit": "the same training as a Ray job: upload, follow its log, end with its exit code",
}
"""Every command that may exist, in the order of help; one whose module is not there is not offered."""


TAKE_SETTINGS = ("train", "plan", "search", "dryrun", "verify", "submit")
"""Commands that take settings and nothing else; the others take words of their own as well."""


class Command(Protocol):
    """What a command's module offers."""

    HELP: str
    """What the command does, with examples."""
    FLAGS: tuple[str, ...]
    """Flags that it knows besides --help, --version, --cfg and --config-dir."""

    def run(self, invocation: Invocation) -> int:
        """Do it and return the exit code. Raises OrchestratorError."""


def offered() -> tuple[str, ...]:
    """Names of the commands that can be typed."""
    return tuple(name for name in SUMMARIES if util.find_spec(f"orchestrator.cli.{name}") is not None)


def command(name: str) -> Command:
    """The module of a command."""
    return cast(Command, import_module(f"orchestrator.cli.{name}"))
