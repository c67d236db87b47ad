"""The real weights of SmolLM2-135M-Instruct, loaded under several plans, compute what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from orchestrator.config.model_folder import model_of
from orchestrator.plan.run_plan import RunPlan
from tests.engine.cases import tiny_plan
from tests.engine.gloo import on_ranks
from tests.engine.huggingface_ranks import loaded
from tests.engine.smollm2 import write_smollm2

pytestmark = pytest.mark.torch

TOLERANCE = 1e-5
"""Largest difference of any logit, over the largest logit: FP32, products summed in another order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_smollm2(tmp_path_factory.mktemp("smollm2") / "hf")


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(49152, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def expected(folder: Path, tokens: Tensor) -> Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = model(tokens, use_cache=False).logits
    return logits


def smollm2_plan(folder: Path, **changes: Any) -> RunPlan:
    model = model_of(folder)
    sizes = {f"model__{key}": value for key, value in model.model_dump().items()}
    return tiny_plan(**sizes, training__sequence_length=24, cluster__gpu={"name": "CPU", "memory_gib": 16}, **changes)


@pytest.mark.parametrize(
    "degrees",
    [{}, {"parallel__tensor": 3}, {"parallel__pipeline": 2}],
    ids=["one process", "TP 3", "PP 2"],
)
def test_imported_logits_are_those_of_transformers(
    degrees: dict[str, int], folder: Path, tokens: Tensor, expected: Tensor
) -> None:
    plan = smollm2_plan(folder, **degrees)
    ranks = on_ranks(len(plan.ranks), loaded, plan, folder, tokens, False)
    found = [one.logits for one in ranks if one.logits is not None]
    assert found
    for logits in found:
        assert float((logits - expected).abs().max() / expected.abs().max()) <= TOLERANCE
