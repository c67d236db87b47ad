"""`verify` refuses what `plan` and the engine refuse, with all problems, before torch is even imported."""

from __future__ import annotations

import json
import sys

import pytest

from orchestrator.cli.main import main

REFUSED = [
    (["+experiment=llama70b_3d", "parallel.tensor=3"], "parallel.tensor: 3 does not divide"),
    (["+experiment=llama7b_zero2", "model.hiden_size=1"], "model.hiden_size"),
    (["+experiment=llama7b_zero2", "parallel.context=2"], "parallel.context: 2 can be planned"),
    (["+experiment=llama7b_ddp", "training.precision=fp32"], "cluster.gpu.memory_gib"),
    (["+experiment=nope"], "no experiment `nope`"),
    (["--multirun"], "`verify` does not know --multirun"),
]


@pytest.mark.parametrize(("words", "told"), REFUSED, ids=[" ".join(words) for words, _ in REFUSED])
def test_a_refused_plan_is_told_with_exit_code_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["verify", *words]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert "nothing was started" in said.err
    assert said.out == ""


def test_a_refusal_has_the_shape_of_the_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "+experiment=llama70b_3d", "parallel.tensor=3", "parallel.pipeline=7", "--json"]) == 2
    said = json.loads(capsys.readouterr().out)
    assert said["agrees"] is None
    assert said["reductions"] == []
    assert "parallel.tensor" in {problem["key"] for problem in said["problems"]}


def test_help_tells_what_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--help"]) == 0
    said = capsys.readouterr().out
    assert "gradient norm on every rank" in said
    assert "python -m orchestrator verify +experiment=llama70b_3d" in said
