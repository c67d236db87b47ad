"""Which entry of `conf/gpu/` a node's GPUs are, from what its driver or its Ray label calls them. Pure.

A driver names the product and its memory, so one entry is left. Ray's label is shorter (`A100`, whatever its memory and
form); where it fits several entries, one is taken and the choice is said.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config import files, locate

_MEMORY_TOLERANCE = 0.06
"""A driver's total and the usable memory of an entry differ by a few per cent."""
_MEMORY_WORD = re.compile(r"(\d+)GB?")
_FORMS = {"PCIE", "SXM", "SXM2", "SXM3", "SXM4", "SXM5", "OAM", "NVL", "HBM2", "HBM2E", "HBM3", "HBM3E"}


@dataclass(frozen=True, slots=True)
class GpuEntry:
    """An entry of `conf/gpu/`, by what is needed to recognise it."""

    option: str
    """Its file, without `.yaml`."""
    name: str
    memory_gib: float


@dataclass(frozen=True, slots=True)
class Match:
    """What was recognised."""

    option: str | None
    """The entry taken; None: none fits."""
    others: tuple[str, ...] = ()
    """Entries that fit as well; empty when the choice is certain."""


def known_entries(directory: Path | None = None) -> tuple[GpuEntry, ...]:
    """Every kind of GPU in the shipped `conf/gpu/` and in `gpu/` of the user's own folder."""
    entries = []
    for option in locate.options("gpu", directory):
        file = locate.option_file("gpu", option, directory)
        body = files.read_body(file) if file is not None else None
        if isinstance(body, dict) and isinstance(body.get("memory_gib"), int | float):  # the CPU's is computed
            entries.append(GpuEntry(option, str(body.get("name", option)), float(body["memory_gib"])))
    return tuple(entries)


def by_product(product: str, memory_gib: float, entries: Iterable[GpuEntry]) -> Match:
    """The entry of a GPU as its driver names it, such as `NVIDIA A100-SXM4-80GB`, with its total memory."""
    said = _words(product)
    fitting = [
        entry
        for entry in entries
        if _model(entry.name) <= _joined(said)
        and abs(entry.memory_gib - memory_gib) <= _MEMORY_TOLERANCE * memory_gib
        and ("PCIE" in _words(entry.name)) <= ("PCIE" in said)
    ]
    # The entry that says most is the closest: the PCIe one for a PCIe card.
    fitting.sort(key=lambda entry: (-len(_words(entry.name)), entry.option))
    return Match(fitting[0].option if fitting else None)


def by_label(label: str, entries: Iterable[GpuEntry]) -> Match:
    """The entry of a GPU as Ray labels its node, such as `A100`, `A100-80G` or `AMD-Instinct-MI300X-OAM`."""
    said = _words(label)
    sizes = _sizes(said)
    fitting = [
        entry
        for entry in entries
        if _model(entry.name) <= _joined(said)
        and (not sizes or sizes & _sizes(_words(entry.name)))
        and ("PCIE" not in said or "PCIE" in _words(entry.name))
    ]
    if not fitting:
        return Match(None)
    fitting.sort(key=lambda entry: ("PCIE" in _words(entry.name), -entry.memory_gib, entry.option))
    exact = [entry for entry in fitting if set(_words(entry.name)) == set(said)]
    if exact:
        return Match(exact[0].option)
    return Match(fitting[0].option, tuple(entry.option for entry in fitting[1:]))


def template(option: str, product: str, memory_gib: float | None) -> str:
    """What to write into `gpu/OPTION.yaml` for a kind that is not known."""
    memory = "MEMORY_IN_GIB" if memory_gib is None else f"{memory_gib:.1f}"
    return f"# @package cluster.gpu\n# {product}.\nname: {product}\nmemory_gib: {memory}\npeak_tflops: {{bf16: ...}}\n"


def option_name(product: str) -> str:
    """A file name for a kind of GPU."""
    return re.sub(r"[^a-z0-9]+", "_", product.lower().removeprefix("nvidia ")).strip("_") or "my_gpu"


def _words(text: str) -> list[str]:
    words = [word for word in re.split(r"[^A-Z0-9]+", text.upper()) if word]
    return [_MEMORY_WORD.sub(r"\1G", word) if _MEMORY_WORD.fullmatch(word) else word for word in words]


def _model(name: str) -> set[str]:
    """The words that name the chip: without memory and form."""
    return {word for word in _words(name) if word not in _FORMS and not _MEMORY_WORD.fullmatch(word)}


def _sizes(words: Iterable[str]) -> set[str]:
    return {word for word in words if _MEMORY_WORD.fullmatch(word)}


def _joined(words: Sequence[str]) -> set[str]:
    """Each word, and each two neighbours as one: `RTX 4090` is the entry RTX4090."""
    return {*words, *(first + second for first, second in itertools.pairwise(words))}
