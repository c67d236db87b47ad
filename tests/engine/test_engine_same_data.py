"""Ranks whose machines hold different text never train together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.core.data_configs import write_files
from tests.engine.cases import tasks_of, tiny_config, tiny_plan
from tests.engine.gloo import RanksFailedError, live

pytestmark = pytest.mark.torch


def test_ranks_that_read_other_text_are_named_before_the_first_step(tmp_path: Path) -> None:
    files = {f"{index}.txt": f"document {index}\n" * 20 for index in range(4)}
    write_files(tmp_path / "here", files)
    write_files(tmp_path / "there", {**files, "2.txt": "another edition\n" * 20})
    values = {
        "data__source": "text",
        "data__cache_directory": str(tmp_path / "cache"),
        "data__validation_fraction": 0.3,
        "model__vocab_size": 257,
        "parallel__data": 2,
    }
    plan = tiny_plan(**values, data__path=str(tmp_path / "here"))
    elsewhere = replace(plan, config=tiny_config(**values, data__path=str(tmp_path / "there")))
    tasks = tasks_of(plan, tmp_path / "run")
    with pytest.raises(RanksFailedError) as caught:
        live([tasks[0], replace(tasks[1], plan=elsewhere)])
    assert set(caught.value.failures) == {0, 1}
    for text in caught.value.failures.values():
        assert "ConfigError: data.source: Rank 1 read other training text than rank 0" in text
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
