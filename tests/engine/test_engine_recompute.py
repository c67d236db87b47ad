"""Activation checkpointing, block by block: what is kept, what is computed twice, and that the gradients are the
same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from models.llama.module import LlamaModel
from orchestrator.engine.compilation import apply_compile
from orchestrator.engine.recompute import apply_recompute
from tests.engine.cases import tiny_config

pytestmark = pytest.mark.torch

PRODUCTS_OF_A_BLOCK = 7
"""Query, key, value, output; gate, up, down."""


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def trained(kind: str, dropout: float = 0.0) -> tuple[list[Tensor], Counter[str], Counter[str]]:
    """Gradients of one forward and backward, and the operations of each."""
    sizes = tiny_config(model__resid_pdrop=dropout, model__attention_dropout=dropout).model
    model = LlamaModel(sizes)
    model.to_empty(device="cpu")
    model.initialise_buffers()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    blocks = list(model.layers.children())
    apply_recompute(blocks, kind, dropout=dropout > 0)  # type: ignore[arg-type]
    tokens = torch.randint(0, 96, (2, 16))
    with Counted() as forward:
        loss = model(tokens).square().mean()
    with Counted() as backward:
        loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None], forward.calls, backward.calls


def attention_calls(calls: Counter[str]) -> int:
    return sum(n for name, n in calls.items() if "scaled_dot_product" in name and "backward" not in name)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["selective", "full"])
def test_the_gradients_are_the_same_bits_as_without(kind: str, dropout: float) -> None:
    for found, wanted in zip(trained(kind, dropout)[0], trained("none", dropout)[0], strict=True):
        assert torch.equal(found, wanted)


def test_full_computes_every_block_again_and_selective_neither_products_nor_attention() -> None:
    plain, selective, full = (trained(kind)[2] for kind in ("none", "selective", "full"))
    assert selective["mm"] == plain["mm"]
    # Two blocks; the last product of a block is not needed again, its result is not part of any gradient.
    assert full["mm"] - plain["mm"] == 2 * (PRODUCTS_OF_A_BLOCK - 1)
    assert attention_calls(plain) == attention_calls(selective) == 0
    assert attention_calls(full) == 2
    assert selective["silu"] - plain["silu"] == full["silu"] - plain["silu"] == 2


def test_full_keeps_the_input_of_a_block_alone() -> None:
    kept = {kind: kept_bytes(kind) for kind in ("none", "full")}
    one_input = 2 * 16 * 32 * 4
    tables = 2 * 64 * 4 * 4
    assert kept["full"] <= one_input + tables
    assert kept["none"] > 8 * one_input


@pytest.mark.parametrize("kind", ["none", "selective"])
def test_alike_blocks_are_compiled_once(kind: str) -> None:
    model = LlamaModel(tiny_config(model__num_hidden_layers=4).model)
    model.to_empty(device="cpu")
    model.initialise_buffers()
    blocks = list(model.layers.children())
    apply_recompute(blocks, kind, dropout=False)  # type: ignore[arg-type]
    torch._dynamo.reset()
    counters.clear()
    apply_compile(blocks, backend="aot_eager")
    for _ in range(2):
        model(torch.randint(0, 96, (2, 16))).square().mean().backward()
    assert counters["stats"]["unique_graphs"] == 1


def kept_bytes(kind: str) -> int:
    """Bytes that one block saves for its backward pass, parameters apart."""
    sizes = tiny_config().model
    model = LlamaModel(sizes)
    model.to_empty(device="cpu")
    model.initialise_buffers()
    (block, _) = model.layers.children()
    apply_recompute([block], kind, dropout=False)  # type: ignore[arg-type]
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.data_ptr() not in parameters:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden = torch.randn(2, 16, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(hidden, model.rotary())
    return sum(seen.values())
