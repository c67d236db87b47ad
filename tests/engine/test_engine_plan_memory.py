"""The planner's activations against the tensors that the real modules save for their backward pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models.gpt.module import GptModel
from models.llama.module import LlamaModel
from orchestrator.config.schema import ModelConfig
from orchestrator.engine import data_parallel
from orchestrator.plan.activations import block_activations
from orchestrator.plan.architecture import architecture_of
from orchestrator.plan.constants import BUCKET_BYTES
from orchestrator.plan.profiles import OURS
from orchestrator.plan.run_plan import ParallelFacts
from orchestrator.plan.work import Work

pytestmark = pytest.mark.torch

SEQUENCE, BATCH = 64, 2
DTYPES = {"fp32": torch.float32, "bf16_mixed": torch.bfloat16}


def sizes(family: str, layers: int) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "family": family,
            "hidden_size": 64,
            "intermediate_size": 176,
            "num_hidden_layers": layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 100,
            "max_position_embeddings": SEQUENCE,
        }
    )


def saved_bytes(family: str, layers: int, dtype: torch.dtype) -> int:
    """Bytes of the distinct storages, weights apart, that a forward pass saves."""
    module = (LlamaModel if family == "llama" else GptModel)(sizes(family, layers)).to(dtype).to_empty(device="cpu")
    module.initialise_buffers()
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.1, 0.1)
    # Tensors are kept, so that no storage is used twice while the saved ones are counted.
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = module(torch.zeros(BATCH, SEQUENCE, dtype=torch.int64))
    assert output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in weights)


def test_the_planner_knows_the_engines_buckets() -> None:
    assert data_parallel.BUCKET_BYTES == {"cpu": None, "cuda": BUCKET_BYTES}


@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed"])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_block_saves_what_the_planner_counts(family: str, precision: str) -> None:
    dtype = DTYPES[precision]
    measured = saved_bytes(family, 3, dtype) - saved_bytes(family, 2, dtype)
    facts = ParallelFacts(1, 1, 1, 1, 0, 1, 1, 1, "1f1b", 1, 1, ((0, 3),))
    work = Work(architecture_of(sizes(family, 3)), facts, SEQUENCE, BATCH, precision, on_gpu=False)
    planned = block_activations(work, OURS).kept
    assert planned == pytest.approx(measured, rel=0.01)
    on_gpu = block_activations(replace(work, on_gpu=True), OURS).kept
    assert on_gpu <= planned
