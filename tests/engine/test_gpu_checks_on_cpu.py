"""The checks of `tests/gpu/` on a CPU with tiny sizes, so that they run on the day when somebody has a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gpu import run
from tests.gpu.checks import CHECKS, Found
from tests.gpu.setting import Setting, setting_of

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_runs_on_a_cpu_and_finds_no_problem(name: str, tmp_path: Path) -> None:
    found = CHECKS[name](setting_of("cpu", tmp_path))
    assert found.problems == []
    assert found.figures


def test_the_command_prints_a_table_and_writes_every_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Setting) -> Found:
        raise ZeroDivisionError("no such kernel")

    monkeypatch.setitem(CHECKS, "fp16", lambda _: Found({"scale": 65536.0}))
    monkeypatch.setitem(CHECKS, "profiler", lambda _: Found(problems=["the trace holds no GPU kernel"]))
    monkeypatch.setitem(CHECKS, "parity", broken)
    assert run.main(["--out", str(tmp_path), "--device", "cpu", "--only", "fp16", "profiler", "parity"]) == 1
    printed = capsys.readouterr().out
    assert "fp16            ok" in printed
    assert "the trace holds no GPU kernel" in printed
    told = json.loads((tmp_path / "results.json").read_text())
    assert told["checks"]["fp16"]["figures"] == {"scale": 65536.0}
    assert "ZeroDivisionError: no such kernel" in told["checks"]["parity"]["problems"][0]


def test_without_a_gpu_the_command_says_so_and_how_to_rehearse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert run.main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "torch sees no GPU here" in said
    assert "--device cpu" in said
