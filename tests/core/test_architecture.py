"""The house's own rules, as far as a machine can hold them: sizes, openings, and what the pure half may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("orchestrator", "models") for path in (ROOT / folder).rglob("*.py"))
LONGEST_FILE = 400
LONGEST_FUNCTION = 60
PURE_ROOMS = (
    "orchestrator",
    "orchestrator.errors",
    "orchestrator.config.compose",
    "orchestrator.plan.make",
    "orchestrator.plan.engine_rules",
    "orchestrator.placement",
    "orchestrator.data.check",
    "orchestrator.data.dataset",
    "orchestrator.data.order",
    "models.registry",
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_and_functions_can_be_read_in_one_go(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= LONGEST_FILE
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert [f.name for f in functions if (f.end_lineno or 0) - f.lineno > LONGEST_FUNCTION] == []


@pytest.mark.parametrize("path", [path for path in SOURCES if path.read_text().strip()], ids=name_of)
def test_every_module_opens_with_what_it_owns(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), "say what it owns, what it refuses, where to go next"


def test_the_pure_half_loads_neither_torch_nor_ray_nor_mlflow() -> None:
    blocked = ("torch", "ray", "mlflow", "transformers")
    script = f"""
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"the pure half must not import {{name}}")
sys.meta_path.insert(0, Refuse())
for room in {PURE_ROOMS!r}:
    importlib.import_module(room)
import orchestrator
plan = orchestrator.make_plan(orchestrator.load_config(["+experiment=llama7b_zero2"]))
print(plan.parallel.world_size)
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "8"
