"""The checks as tests, for whoever has a GPU: `python -m pytest tests/gpu -m gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.checks import CHECKS
from tests.gpu.setting import setting_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_finds_no_problem(name: str, tmp_path: Path) -> None:
    found = CHECKS[name](setting_of("cuda", tmp_path))
    print(found.figures)
    assert found.problems == []
