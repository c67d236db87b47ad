"""How problems and warnings look on a terminal: a numbered list on stderr, nothing but results on stdout.

Plain text, wrapped at the terminal's width; no colours are needed to read it and no library is imported.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from orchestrator.errors import Problem

if TYPE_CHECKING:
    from rich.console import Console

_PROGRAM = "python -m orchestrator"
"""Where a command begins at the end of a fix."""


def problems_text(problems: Sequence[Problem], width: int, opening: str = "", besides: int = 0) -> str:
    """The problems as a list: key, reason, and under an arrow what to change. The last `besides` stand apart."""
    count = len(problems)
    lines = [
        opening or ("1 problem; nothing was started." if count == 1 else f"{count} problems; nothing was started.")
    ]
    digits = len(str(count))
    for number, problem in enumerate(problems, start=1):
        if besides and number == count - besides + 1:
            lines.append("Found besides, with the settings above left out:")
        first = f"{number:>{digits}}. "
        indent = " " * len(first)
        text = f"{problem.key}: {problem.message}" if problem.key else problem.message
        lines += _wrapped(text, width, first, indent)
        advice, named, arguments = problem.fix.partition(_PROGRAM)
        if advice.strip():
            lines += _wrapped(advice, width, f"{indent}-> ", f"{indent}   ")
        if named:
            lines.append(f"{indent}   {named}{arguments}")  # in one piece, to be copied
    return "\n".join(lines)


def print_problems(problems: Sequence[Problem], opening: str = "", besides: int = 0) -> None:
    """Print the problems to stderr."""
    print(problems_text(problems, terminal_width(), opening, besides), file=sys.stderr, flush=True)


def print_warnings(warnings: Iterable[str]) -> None:
    """Print warnings to stderr, one paragraph each."""
    for warning in warnings:
        print("\n".join(_wrapped(f"warning: {warning}", terminal_width(), "", "  ")), file=sys.stderr, flush=True)


def page_console() -> Console:
    """Where a page is printed."""
    from rich.console import Console

    return Console()


def terminal_width() -> int:
    """Columns to write into, within what is comfortable to read."""
    return max(60, min(shutil.get_terminal_size((116, 24)).columns, 116))


def _wrapped(text: str, width: int, first: str, indent: str) -> list[str]:
    lines: list[str] = []
    for paragraph in text.splitlines() or [""]:
        lines += textwrap.wrap(
            paragraph,
            width,
            initial_indent=indent if lines else first,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines
