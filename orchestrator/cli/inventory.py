"""`inventory`: what the live Ray cluster has, as a table and as a `cluster/NAME.yaml` for `--config-dir`.

Asking is `launch/survey.py`'s, declaring `launch/declare.py`'s; here both are printed and, with `--write`, the file is
written after it was read back and composed. Exit 2 when there is nothing to declare.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.invocation import Invocation
from orchestrator.config import locate
from orchestrator.errors import ConfigError, Problem

if TYPE_CHECKING:
    from orchestrator.launch.declare import Declaration, Device, LiveNode

HELP = """\
python -m orchestrator inventory [NAME] [--write] [--address HOST:PORT] [--device cpu] [gpu=KIND] [--json]

Asks the Ray cluster at RAY_ADDRESS (or --address) what it has: a table of its nodes, and the cluster as a configuration
file. Unlike nodes become node groups; GPUs are matched with conf/gpu/ by what their driver, or Ray's label, calls them.
With --write the file is conf/cluster/NAME.yaml in the folder of --config-dir, `my_conf` unless another is given, and is
used with `cluster=NAME --config-dir my_conf`. `cluster=ray` asks in the same way each time, without a file.
Exit code 0: done; 2: the cluster does not answer, has no GPU, or has one that no entry of conf/gpu/ describes.

  python -m orchestrator inventory
  python -m orchestrator inventory ours --write --config-dir my_conf
  python -m orchestrator plan +experiment=llama7b_zero2 cluster=ours --config-dir my_conf
"""

FLAGS = ("--json", "--write", "--address", "--device")
_FOLDER = "my_conf"
_NAME = re.compile(r"[A-Za-z0-9][\w-]*")


def run(invocation: Invocation) -> int:
    """Print the inventory. Raises ConfigError for bad words and for a cluster that cannot be asked or declared."""
    name, gpu = _words(invocation)
    folder = Path(invocation.config_directory or _FOLDER)
    file = _file_to_write(folder, name) if "--write" in invocation.options else None
    if "--address" in invocation.options:
        os.environ["RAY_ADDRESS"] = invocation.options["--address"]
    from orchestrator.launch.declare import document
    from orchestrator.launch.session import cluster_address
    from orchestrator.launch.survey import declared_cluster, survey

    nodes = survey()
    device: Device = "cpu" if invocation.options.get("--device") == "cpu" else "cuda"
    directory = folder.expanduser().absolute() if folder.is_dir() else None
    declared = declared_cluster(nodes, device, gpu, directory)
    text = ""
    if not declared.problems:
        text = document(declared, name, str(cluster_address()), datetime.datetime.now(datetime.UTC).date().isoformat())
        _check(text, folder, name)
    if invocation.json:
        _print_json(nodes, declared, name, text)
    else:
        print("\n".join(table(nodes, declared)))
    if declared.problems:
        raise ConfigError(declared.problems)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = _keep(file, text)
        file.write_text(text, encoding="utf-8")
        if kept is not None and not invocation.json:
            print(f"\n{file} said something else; what it said is kept as {kept}")
    if not invocation.json:
        print(f"\n{text}")
        print(_next(name, folder, file))
    return 0


def _words(invocation: Invocation) -> tuple[str, str | None]:
    """(name of the cluster, kind of GPU or None)."""
    problems = list(invocation.problems)
    name, gpu = "live", None
    for position, word in enumerate(invocation.overrides):
        key, equals, value = word.partition("=")
        if not equals and position == 0:
            name = word
        elif key == "gpu" and value:
            gpu = value
        else:
            problems.append(Problem(word, f"`{word}` is nothing that inventory takes.", "It takes NAME and gpu=KIND."))
    if not _NAME.fullmatch(name):
        problems.append(Problem("NAME", f"`{name}` is no name for a file.", "Use letters, digits, - and _."))
    directory = Path(invocation.config_directory) if invocation.config_directory else None
    known = locate.options("gpu", directory)
    if gpu is not None and gpu not in known:
        problems.append(Problem("gpu", f"There is no GPU `{gpu}` in conf/gpu/.", f"Known: {', '.join(known)}."))
    if invocation.options.get("--device", "cpu") not in ("cpu", "cuda"):
        problems.append(Problem("--device", "Only cpu and cuda are devices.", "Write --device cpu."))
    if problems:
        raise ConfigError(problems)
    return name, gpu


def _file_to_write(folder: Path, name: str) -> Path:
    if (locate.shipped_directory() / "cluster" / f"{name}.yaml").is_file():
        raise ConfigError(
            Problem("NAME", f"`{name}` is the name of a shipped cluster, which would hide yours.", "Take another name.")
        )
    return folder / "cluster" / f"{name}.yaml"


def _keep(file: Path, text: str) -> Path | None:
    """Where a file that says something else than `text` has been moved; None: there is none."""
    if not file.is_file() or file.read_text(encoding="utf-8") == text:
        return None
    for number in itertools.count(1):
        kept = file.with_suffix(f".yaml.{number}")
        if not kept.exists():
            return file.rename(kept)
    raise AssertionError("there is always a next number")


def _check(text: str, folder: Path, name: str) -> None:
    """Compose the file with the user's other options. Raises ConfigError when the schema refuses what was found."""
    from orchestrator.config.compose import load_config

    with tempfile.TemporaryDirectory() as place:
        for part in ("cluster", "gpu"):
            (Path(place) / part).mkdir()
        for own in sorted((folder / "gpu").glob("*.yaml")):
            (Path(place) / "gpu" / own.name).write_bytes(own.read_bytes())
        option = f"{name}_from_inventory"  # whatever it is called, it is not a shipped one
        (Path(place) / "cluster" / f"{option}.yaml").write_text(text, encoding="utf-8")
        load_config([f"cluster={option}"], config_directory=place)


def table(nodes: tuple[LiveNode, ...], declared: Declaration) -> list[str]:
    """One line a node; those that take no part say so."""
    from orchestrator.launch.declare import domain_of

    entry_of = {node_id: group.gpu for group in declared.groups for node_id in group.node_ids}
    rows = [("node", "GPUs", "kind", "entry", "GPU GiB", "CPUs", "GiB", "domain", "")]
    for node in nodes:
        takes_part = node.gpus > 0 if declared.device == "cuda" else node.cpus > 0
        product, memory = node.products[0] if node.products else (node.kind, None)
        rows.append(
            (
                node.name,
                str(node.gpus),
                product or "-",
                entry_of.get(node.node_id, "-") if takes_part else "-",
                "-" if memory is None else f"{memory:.1f}",
                str(node.cpus),
                "-" if node.memory_gib is None else f"{node.memory_gib:.0f}",
                domain_of(node, declared.domain_label) or "-",
                "" if takes_part else "no GPU: not used for training",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, *(f"note: {note}" for note in declared.notes)]


def _print_json(nodes: tuple[LiveNode, ...], declared: Declaration, name: str, text: str) -> None:
    values = {
        "schema_version": 1,
        "nodes": [node.to_dict() for node in nodes],
        "cluster": declared.body(name) if text else None,
        "yaml": text or None,
        "notes": list(declared.notes),
        "problems": [problem.to_dict() for problem in declared.problems],
    }
    json.dump(values, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def _next(name: str, folder: Path, file: Path | None) -> str:
    if file is None:
        return f"To keep it as {folder}/cluster/{name}.yaml: python -m orchestrator inventory {name} --write"
    return f"written to {file}; use it with: cluster={name} --config-dir {folder}"
