"""The command line: takes it apart, hands it to one command, turns every error into a readable list and an exit code.

Exit codes: 0 done, 2 the configuration or the plan is refused, 3 the run failed, 4 stopped by a signal. Results go to
stdout, problems to stderr. A command is a file of this folder, named in `commands.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator import __version__
from orchestrator.cli import commands
from orchestrator.cli.console import NO_ROOM, outliving_console
from orchestrator.cli.invocation import DEFAULT_COMMAND, Invocation, parse
from orchestrator.cli.show import print_problems
from orchestrator.config import locate
from orchestrator.config.suggest import did_you_mean, nearest
from orchestrator.errors import ConfigError, OrchestratorError, Problem

FAILED, STOPPED = 3, 4


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. Never raises for a user's mistake or an interrupt."""
    invocation = parse(sys.argv[1:] if argv is None else argv)
    with outliving_console() as console:
        code = _exit_code(invocation)
        sys.stdout.flush()
        return code if console.no_room is None else _printed_in_part(invocation, code, console.no_room)


def _printed_in_part(invocation: Invocation, code: int, error: OSError) -> int:
    """Say that some of stdout is missing: a command whose result that was has failed, a training has its record."""
    print(
        f"Some lines could not be written to stdout: {error.strerror}. Free space, or write elsewhere.", file=sys.stderr
    )
    page = invocation.help or invocation.version or invocation.show_config
    return code if invocation.command == DEFAULT_COMMAND and not page else code or FAILED


def _exit_code(invocation: Invocation) -> int:
    """Do what was asked for and turn whatever comes of it into words and an exit code."""
    try:
        return _dispatch(invocation)
    except OrchestratorError as error:
        opening = "" if error.exit_code == ConfigError.exit_code else _failed(invocation)
        print_problems(error.problems, opening, besides=getattr(error, "besides", 0))
        return error.exit_code
    except KeyboardInterrupt as stop:  # whoever had begun something says what is left of it
        said = str(stop) or "Stopped before anything was started; the same command starts it again."
        print(f"\n{said}", file=sys.stderr)
        return STOPPED
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "orchestrator", "models"):
            return _defect()
        print(
            f"{sys.executable} lacks the package `{missing}`, which this program needs; nothing was started.\n"
            "Install it there with its requirements (`pip install -c infra/constraints.txt -e .`), or use the "
            "environment that has them (submit: --python PATH).",
            file=sys.stderr,
        )
        return ConfigError.exit_code
    except OSError as error:
        if error.errno not in NO_ROOM:
            return _defect()
        where = f" to {error.filename}" if error.filename else ""
        print(f"Nothing more can be written{where}: {error.strerror}. Free space, or write elsewhere.", file=sys.stderr)
        return FAILED
    except Exception:
        return _defect()


def _failed(invocation: Invocation) -> str:
    """The line above what went wrong: only `train` is a run."""
    return "The run failed." if invocation.command == DEFAULT_COMMAND else f"`{invocation.asked}` failed."


def _defect() -> int:
    """Show the exception at hand as what it is, ours."""
    import traceback

    traceback.print_exc()
    print("This is a defect of the program, not of what you asked: please report the lines above.", file=sys.stderr)
    return FAILED


def _dispatch(invocation: Invocation) -> int:
    if invocation.version:
        print(f"orchestrator {__version__}")
        return 0
    if invocation.command == "help" and invocation.command_was_given:
        invocation.help = True
        invocation.command_was_given = False
        invocation.help_topic = invocation.help_topic or next(iter(invocation.overrides), None)
    elif invocation.command not in commands.offered():
        raise ConfigError([_unknown_command(invocation), *invocation.problems])
    if not invocation.command_was_given or invocation.command in commands.TAKE_SETTINGS:
        _refuse_late_command(invocation)
    if foreign := locate.check_models_package():
        raise ConfigError(foreign)  # before any import of it fails with a message about something else
    if invocation.help:
        return _help(invocation)
    module = commands.command(invocation.command)
    switches = {"--json": invocation.json, "--multirun": invocation.multirun}
    for flag in (*(name for name, is_given in switches.items() if is_given), *invocation.options):
        if flag not in module.FLAGS:
            knows = ", ".join(name for name in commands.offered() if flag in commands.command(name).FLAGS)
            problem = Problem(flag, f"`{invocation.command}` does not know {flag}.", f"It belongs to: {knows}.")
            invocation.problems.append(problem)
    if invocation.show_config:
        return _show_config(invocation)
    return module.run(invocation)


def _refuse_late_command(invocation: Invocation) -> None:
    """A command after its settings, or a second one: said as what it is, not as a setting without a value."""
    for word in [word for word in invocation.overrides if word in commands.offered()]:
        invocation.overrides.remove(word)
        wrong, fix = f"The command `{word}` comes after other words.", f"Put `{word}` first."
        if invocation.command_was_given:
            wrong, fix = f"`{invocation.command}` is the command already.", f"Leave `{word}` out."
        invocation.problems.append(Problem(word, wrong, fix))


def _show_config(invocation: Invocation) -> int:
    import yaml

    print(yaml.safe_dump(invocation.load().to_dict(), sort_keys=False, allow_unicode=True), end="")
    return 0


def _help(invocation: Invocation) -> int:
    from orchestrator.cli.help import command_help, top_help
    from orchestrator.config.reference import explain

    directory = Path(invocation.config_directory) if invocation.config_directory else None
    topic = invocation.help_topic
    if topic is None and invocation.command_was_given:
        print(command_help(invocation.command))
    elif topic is None:
        print(top_help(directory))
    elif topic in commands.offered():
        print(command_help(topic))
        if topic in locate.GROUPS:  # `checkpoint` is both
            print(f"\n\nThe keys of the same name\n\n{explain(topic, directory)}")
    else:
        print(explain(topic, directory))
    return 0


def _unknown_command(invocation: Invocation) -> Problem:
    word = invocation.command
    experiments = locate.options("experiment")
    close = nearest(word, commands.offered())
    experiment = nearest(word, experiments)
    if word in experiments or (experiment and not close):
        hint = f"For the experiment write `+experiment={word if word in experiments else experiment[0]}`."
    else:
        hint = did_you_mean(close)
    return Problem(
        "", f"There is no command `{word}`.", f"{hint} The commands are {', '.join(commands.offered())}.".strip()
    )
