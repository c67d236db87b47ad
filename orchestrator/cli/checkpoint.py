"""`checkpoint`: look after checkpoints. The second word says what: each is a file of its own, `checkpoint_<word>.py`.

Such a file has `SUMMARY` (one line), `HELP`, `FLAGS` and `run(invocation, words)`, where `words` are what was typed
after the second word. One whose file is not there is not offered.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module, util
from typing import Protocol, cast

from orchestrator.checkpoint.object_storage import hurried
from orchestrator.cli.invocation import VALUE_FLAGS, Invocation
from orchestrator.config.suggest import did_you_mean, nearest
from orchestrator.errors import ConfigError, Problem, RunError

_WORDS = ("ls", "verify", "export", "import")
"""Every second word that may exist, in the order of help."""


_PATIENCE_SECONDS = 5.0
"""How long an object store that does not answer is tried again while somebody waits; a training has more patience."""


class Subcommand(Protocol):
    """What the module of a second word offers."""

    SUMMARY: str
    """One line for the list."""
    HELP: str
    """What it takes and prints, with examples."""
    FLAGS: tuple[str, ...]
    """Flags that it knows besides those of every command."""

    def run(self, invocation: Invocation, words: Sequence[str]) -> int:
        """Do it and return the exit code.

        Raises OrchestratorError, and KeyboardInterrupt with what is left where something had been written.
        """


def offered() -> tuple[str, ...]:
    """Second words that can be typed."""
    return tuple(word for word in _WORDS if util.find_spec(f"orchestrator.cli.checkpoint_{word}") is not None)


def subcommand(word: str) -> Subcommand:
    """The module of a second word."""
    return cast(Subcommand, import_module(f"orchestrator.cli.checkpoint_{word}"))


def _help() -> str:
    parts = [
        "python -m orchestrator checkpoint WORD ...\n",
        "Looks after the checkpoints of runs, in a folder or an object store (s3://bucket/prefix).\n",
        *(f"  {word:<8}{subcommand(word).SUMMARY}" for word in offered()),
        "\nExit code 0: done; 2: refused, nothing was written; 3: it failed; 4: stopped by Ctrl-C.\n",
        *(subcommand(word).HELP for word in offered()),
    ]
    return "\n".join(parts)


HELP = _help()

FLAGS = ("--json", *VALUE_FLAGS)


def run(invocation: Invocation) -> int:
    """Hand what was typed to the second word. Raises ConfigError when there is none of that name."""
    word, *words = invocation.overrides or [""]
    known = offered()
    problems = list(invocation.problems)
    if word not in known:
        wrong = f"There is no `checkpoint {word}`." if word else "It was not said what to do with checkpoints."
        fix = f"{did_you_mean(nearest(word, known))} Write `checkpoint` and one of: {', '.join(known)}.".strip()
        raise ConfigError([Problem("checkpoint", wrong, fix), *problems])
    module = subcommand(word)
    given = (*(("--json",) if invocation.json else ()), *invocation.options)
    problems += [
        Problem(flag, f"`checkpoint {word}` does not know {flag}.", "Leave it out.")
        for flag in given
        if flag not in module.FLAGS
    ]
    if problems:
        raise ConfigError(problems)
    with hurried(_PATIENCE_SECONDS):
        try:
            return module.run(invocation, words)
        except PermissionError as error:
            fix = "Give its owner's rights, or ask as a user who has them."
            raise RunError(Problem("", f"{error.filename} may not be read or written by this user.", fix)) from error
        except KeyboardInterrupt as stop:
            raise KeyboardInterrupt(str(stop) or "Stopped; nothing was written or changed.") from None
