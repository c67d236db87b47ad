"""Which attention kernel ran is read off what ran: another choice of torch's is told as such."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.registry import family
from orchestrator.engine.attention_kernel import AttentionWatch, kernel_of, watch_attention
from orchestrator.engine.compilation import apply_compile
from orchestrator.engine.recompute import apply_recompute
from tests.engine.cases import tiny_config
from tests.engine.small_models import build_random

pytestmark = pytest.mark.torch


def model_of(**changes: Any) -> tuple[nn.Module, Any]:
    sizes = tiny_config(**changes).model
    return build_random(sizes, torch.float32).train(), family(sizes.family).sharding_table(sizes)


def step(model: nn.Module) -> None:
    model(torch.randint(0, 96, (2, 16))).square().mean().backward()


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("allowed", "changes", "wanted"),
    [
        (None, {}, "flash_cpu"),
        (None, {"model__sliding_window": 4}, "flash_cpu"),
        (SDPBackend.MATH, {}, "math"),
        # torch's kernel for CPUs has no dropout inside.
        (None, {"model__attention_dropout": 0.1}, "math"),
    ],
    ids=["as torch chooses", "window", "math asked for", "dropout"],
)
def test_the_kernel_that_ran_is_named(
    allowed: SDPBackend | None, changes: dict[str, Any], wanted: str, recompute: str
) -> None:
    model, table = model_of(**changes)
    apply_recompute(list(model.layers.children()), recompute, dropout=False)  # type: ignore[arg-type, union-attr, operator]
    watch = watch_attention([model], table, compiled=False)
    assert watch.kernel is None
    with nullcontext() if allowed is None else sdpa_kernel(allowed):
        step(model)
    assert watch.kernel == wanted
    assert all(not module._forward_hooks for module in model.modules())


def test_a_forward_pass_without_gradients_says_nothing() -> None:
    model, table = model_of()
    watch = watch_attention([model], table, compiled=False)
    with torch.no_grad():
        model(torch.randint(0, 96, (2, 16)))
    assert watch.kernel is None
    step(model)
    assert watch.kernel == "flash_cpu"


def test_layers_that_differ_are_all_named() -> None:
    watch = AttentionWatch([], compiled=False)
    watch._seen |= {"math", "flash"}
    assert watch.kernel == "flash, math"


def test_a_result_that_no_attention_made_is_no_fused_kernel_s() -> None:
    assert kernel_of((torch.randn(3, requires_grad=True) * 2).view(3, 1)) == "math"


def test_compiled_blocks_are_read_from_the_operations_of_an_ordinary_step() -> None:
    model, table = model_of()
    torch._dynamo.reset()
    apply_compile(list(model.layers.children()), backend="aot_eager")  # type: ignore[union-attr, operator]
    watch = watch_attention([model], table, compiled=True)
    with watch.observing(steady=False):
        step(model)
    assert watch.kernel is None
    with watch.observing(steady=True):
        step(model)
    assert watch.kernel == "flash_cpu"


def test_it_is_said_once_in_the_rank_s_log(capsys: pytest.CaptureFixture[str]) -> None:
    model, table = model_of()
    watch = watch_attention([model], table, compiled=False)
    watch.tell()
    for _ in range(2):
        step(model)
        watch.tell()
    assert capsys.readouterr().out == "attention ran in torch's kernel: flash_cpu\n"
