"""The help texts of the program and of each command. What the configuration offers comes from `config/reference.py`."""

from __future__ import annotations

from pathlib import Path

from orchestrator.cli import commands
from orchestrator.config import reference

_TOP = """\
python -m orchestrator [COMMAND] [+experiment=NAME] [GROUP=OPTION ...] [KEY=VALUE ...]

Declare a model, the GPUs and how training is split over them; have the plan proven and priced; train it on Ray.
With nothing at all it trains the quick-start: a small LLaMA on this machine's CPU, in a few minutes.

Commands
{commands}

Examples
  python -m orchestrator                                          the quick-start
  python -m orchestrator training.steps=50 optimizer.lr=3e-4      the quick-start, changed
  python -m orchestrator plan +experiment=llama7b_zero2           what LLaMA-7B on 8 A100 needs and costs
  python -m orchestrator plan model=llama3_8b cluster=h100_80gb_1x8 parallel=zero3 training=pretrain_8k_1t
  python -m orchestrator +experiment=llama7b_zero2 data=text data.path=corpus/ data.tokenizer=tokenizer.json

Groups and their options (GROUP=OPTION; an experiment is a combination of them)
{groups}

Flags
  --help [COMMAND | GROUP | KEY | EXPERIMENT]   explain it: `--help parallel`, `--help training.tokens`, `--help keys`
  --cfg job                                     print the composed configuration and stop
  --config-dir FOLDER                           your own options, for example FOLDER/experiment/mine.yaml
  --json                                        every command that prints results: for machines
  -m, --multirun                                train: one run for each combination of `KEY=1,2,3`
  --version

A value on the command line wins over every file; an experiment's body wins over the groups it combines.
Exit codes: 0 done, 2 refused before anything started, 3 the run failed, 4 stopped by a signal and can be continued."""


def top_help(config_directory: Path | None = None) -> str:
    """The text of `--help`."""
    listed = "\n".join(f"  {name:<10}  {commands.SUMMARIES[name]}" for name in commands.offered())
    return _TOP.format(commands=listed, groups=reference.groups_text(config_directory))


def command_help(name: str) -> str:
    """The text of `COMMAND --help`."""
    return (
        commands.command(name).HELP.rstrip()
        + "\n\n`--help` lists the groups and their options; `--help GROUP` or `--help KEY` explains one."
    )
