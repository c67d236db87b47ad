"""The schema as a list of dotted keys: what each key takes, in words, its default and its docstring.

Everything here is read off the classes of `schema/`; nothing is written down twice. `suggest.py` searches these keys,
`type_errors.py` and `reference.py` put them into sentences.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from orchestrator.config.schema import RunConfig, Section
from orchestrator.config.schema import base as numbers

_NUMBER_WORDS = (
    (numbers.Whole, "a whole number"),
    (numbers.Count, "a whole number of at least 1"),
    (numbers.CountOrZero, "a whole number of at least 0"),
    (numbers.Real, "a number"),
    (numbers.Positive, "a number above 0"),
    (numbers.AboveOne, "a number above 1"),
    (numbers.PositiveOrZero, "a number of at least 0"),
    (numbers.Fraction, "a number of at least 0 and below 1"),
)


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration."""

    name: str
    """Dotted; `*` stands for a position in a list."""
    annotation: Any
    """Declared type, `Annotated` parts included."""
    required: bool
    default: Any
    """The schema's default; meaningless when `required`."""
    doc: str
    is_section: bool
    """Whether keys lie below it."""

    @property
    def takes(self) -> str:
        """What may be written here, in words."""
        return words(self.annotation)


@cache
def all_keys() -> dict[str, Key]:
    """Every dotted key, sections included, in the schema's order."""
    return {key.name: key for key in _walk(RunConfig, "")}


@cache
def leaf_names() -> tuple[str, ...]:
    """Dotted names of all keys that take a value of their own, `*` positions left out."""
    return tuple(key.name for key in all_keys().values() if not key.is_section and "*" not in key.name)


def find(name: str) -> Key | None:
    """The key of that dotted name; positions in lists (`cluster.node_groups.0`) and free names of maps are known."""
    parts = ["*" if part.isdigit() else part for part in name.replace("[", ".").replace("]", "").split(".")]
    found = all_keys().get(".".join(parts))
    if found is None and len(parts) > 1:
        parent = all_keys().get(".".join(parts[:-1]))
        if parent is not None and (get_origin(bare(parent.annotation)) is dict or _indexes(parent, parts[-1])):
            element = _element(parent.annotation)
            return Key(name, element, False, None, parent.doc, section_of(element) is not None)
    return found


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds (`Section`, `Section | None`), if it holds one."""
    for choice in _choices(annotation):
        if isinstance(choice, type) and issubclass(choice, Section):
            return choice
    return None


def accepts_text(annotation: Any) -> bool:
    """Whether any text is a legal value."""
    return any(bare(choice) is str for choice in _choices(annotation))


def literals(annotation: Any) -> list[Any]:
    """The fixed words that are legal values."""
    return [word for choice in _choices(annotation) if get_origin(choice) is Literal for word in get_args(choice)]


def bare(annotation: Any) -> Any:
    """The type without its `Annotated` parts."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def words(annotation: Any) -> str:
    """A type in words: `Count | Literal["auto"]` is "a whole number of at least 1 or `auto`"."""
    parts: list[str] = []
    for choice in _choices(annotation):
        part = _one(choice)
        if part not in parts:
            parts.append(part)
    return " or ".join(parts)


def _one(choice: Any) -> str:
    for known, text in _NUMBER_WORDS:
        if choice == known:
            return text
    origin, inner = get_origin(choice), get_args(choice)
    if origin is Literal:
        shown = [f"`{word}`" for word in inner]
        return shown[0] if len(shown) == 1 else "one of " + ", ".join(shown)
    if origin is tuple:
        if inner[-1] is Ellipsis:
            return f"a list, each entry {words(inner[0])}"
        return f"a list of {len(inner)}, each {words(inner[0])}"
    if origin is dict:
        return "a map of names to text"
    if isinstance(choice, type) and issubclass(choice, Section):
        return "a map with the keys " + ", ".join(choice.model_fields)
    plain = {str: "text", bool: "true or false", int: "a whole number", float: "a number", types.NoneType: "null"}
    return plain[bare(choice)]


def _choices(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(part for choice in get_args(annotation) for part in _choices(choice))
    return (annotation,)


def _element(annotation: Any) -> Any:
    """Type of one entry of a map or a list."""
    if get_origin(bare(annotation)) is dict:
        return get_args(bare(annotation))[-1]
    return next(get_args(bare(choice))[0] for choice in _choices(annotation) if get_origin(bare(choice)) is tuple)


def _indexes(parent: Key, part: str) -> bool:
    return part == "*" and any(get_origin(bare(choice)) is tuple for choice in _choices(parent.annotation))


def _walk(section: type[Section], prefix: str) -> Iterator[Key]:
    hints = get_type_hints(section, include_extras=True)
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        annotation = hints[name]
        inner = section_of(annotation)
        default = field.get_default(call_default_factory=True)
        doc = " ".join((field.description or "").split())
        yield Key(key, annotation, field.is_required(), default, doc, inner is not None)
        if inner is not None:
            yield from _walk(inner, f"{key}.")
        for choice in _choices(annotation):
            if get_origin(choice) is tuple and (entry := section_of(get_args(choice)[0])) is not None:
                yield from _walk(entry, f"{key}.*.")
