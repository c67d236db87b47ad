"""Pydantic's findings in human words: the key, what was given, what it takes, and from which file the value came.

Several findings for one key (one a branch of a union) become one problem. Nothing of pydantic's vocabulary is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from orchestrator.config import keys, locate
from orchestrator.config.suggest import did_you_mean, nearest, nearest_keys
from orchestrator.errors import Problem


def to_problems(error: ValidationError, source_of: Callable[[str], Path | None]) -> list[Problem]:
    """One problem a key. `source_of` tells which file set a key, None when the command line did."""
    found: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        name, given = _locate(detail["loc"]), detail.get("input")
        if detail["type"] == "extra_forbidden":
            found.setdefault(name, _unknown(name, source_of(name)))
        elif detail["type"] == "missing" and isinstance(detail["loc"][-1], int):
            name = name.rpartition(".")[0]  # a list that is too short
            found.setdefault(name, _wrong(name, given, "", source_of(name)))
        elif detail["type"] == "missing":
            found.setdefault(name, _missing(name, source_of(name.rpartition(".")[0])))
        else:
            found.setdefault(name, _wrong(name, given, detail["msg"], source_of(name)))
    return list(found.values())


def _locate(path: tuple[int | str, ...]) -> str:
    """The dotted key of a finding's path, without the names of union branches at its end."""
    name = ""
    for position, part in enumerate(path):
        longer = f"{name}.{part}" if name else str(part)
        if keys.find(longer) is None:
            # An unknown key ends the path; anything else that the schema does not know is the name of a union's branch.
            parent = keys.find(name)
            is_last = position == len(path) - 1
            return longer if is_last and (not name or (parent is not None and parent.is_section)) else name
        name = longer
    return name


def _unknown(name: str, file: Path | None) -> Problem:
    where = f"{locate.display(file)}: there" if file else "There"
    hint = did_you_mean(nearest_keys(name, keys.leaf_names()))
    return Problem(name, f"{where} is no key `{name}`.", hint)


def _missing(name: str, file: Path | None) -> Problem:
    key = keys.find(name)
    what = f" ({key.doc.rstrip('.')}; {key.takes})" if key else ""
    where = f"Write it into {locate.display(file)}, or give" if file else "Give"
    return Problem(name, f"It is needed and nothing sets it{what}.", f"{where} {name}=VALUE.")


def _wrong(name: str, given: Any, message: str, file: Path | None) -> Problem:
    key = keys.find(name)
    where = f" in {locate.display(file)}" if file else ""
    if key is None:
        return Problem(name, f"{given!r} was given{where}: {message}.", "Change it.")
    reason = ""
    if isinstance(given, float) and message.startswith("Value error, "):  # of other values the type says enough
        reason = f" ({message.removeprefix('Value error, ')})"
    hint = ""
    if isinstance(given, str):
        hint = did_you_mean(nearest(given, [str(word) for word in keys.literals(key.annotation)]))
    return Problem(
        name, f"{_shown(given)} was given{where}, but it takes {key.takes}{reason}.", hint or f"{_meaning(key)}"
    )


def _meaning(key: keys.Key) -> str:
    return f"It means: {key.doc}" if key.doc else ""


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
