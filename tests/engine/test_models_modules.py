"""The modules by themselves: names as the specs say, cuts by stage, by head and by sequence, buffers, dropout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import models
from models.layers.attention import AttentionCore
from models.registry import FAMILIES, family
from models.spec import parameter_specs
from orchestrator.config.schema.model import ModelConfig
from tests.engine.small_models import build_meta, build_ours, build_random, make_sizes, matches, tokens_of

pytestmark = pytest.mark.torch

MODELS = Path(models.__file__).parent

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama grouped, tied, biased": {"num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True},
    "llama own head width": {"head_dim": 12, "attention_bias": True, "attention_output_bias": False},
    "gpt": {"family": "gpt"},
    "gpt tied": {"family": "gpt", "tie_word_embeddings": True},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
class TestSpecsAndModule:
    def test_names_and_shapes_are_those_of_the_specs_in_order(self, changes: dict[str, Any]) -> None:
        sizes, model = self.meta(changes)
        expected = [(one.name, one.shape) for one in parameter_specs(sizes) if one.tied_to is None]
        assert [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()] == expected

    def test_the_state_dict_holds_every_spec_and_no_buffer(self, changes: dict[str, Any]) -> None:
        sizes, model = self.meta(changes)
        assert set(model.state_dict()) == {one.name for one in parameter_specs(sizes)}

    def test_nothing_is_allocated_by_construction(self, changes: dict[str, Any]) -> None:
        _, model = self.meta(changes)
        assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}

    def test_every_style_pattern_hits_a_module(self, changes: dict[str, Any]) -> None:
        sizes, model = self.meta(changes)
        names = [name for name, _ in model.named_modules()]
        for pattern, _ in family(sizes.family).sharding_table(sizes).styles:
            assert any(matches(pattern, name) for name in names), pattern

    def test_every_module_with_parameters_has_exactly_one_style(self, changes: dict[str, Any]) -> None:
        sizes, model = self.meta(changes)
        styles = family(sizes.family).sharding_table(sizes).styles
        for name, module in model.named_modules():
            if list(module.parameters(recurse=False)):
                assert sum(matches(pattern, name) for pattern, _ in styles) == 1, name

    def test_every_linear_is_cut_and_nothing_else_is_called_linear(self, changes: dict[str, Any]) -> None:
        sizes, model = self.meta(changes)
        table = family(sizes.family).sharding_table(sizes)
        linear = {"colwise", "rowwise", "vocabulary_head"}
        for name, module in model.named_modules():
            style = next((style for pattern, style in table.styles if matches(pattern, name)), None)
            assert (style in linear) == isinstance(module, nn.Linear), name

    def test_units_and_parts_name_modules_of_the_model(self, changes: dict[str, Any]) -> None:
        sizes, model = self.meta(changes)
        table = family(sizes.family).sharding_table(sizes)
        names = [name for name, _ in model.named_modules()]
        for pattern in [*table.embedding, *table.head, table.layers, *(one for unit in table.units for one in unit)]:
            assert any(matches(pattern, name) for name in names), pattern

    @staticmethod
    def meta(changes: dict[str, Any]) -> tuple[ModelConfig, nn.Module]:
        sizes = make_sizes(**changes)
        return sizes, build_meta(sizes)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_stages_in_a_row_compute_what_the_whole_model_computes(changes: dict[str, Any]) -> None:
    sizes = make_sizes(**changes)
    tokens = tokens_of(sizes, 2, 17)
    whole = build_random(sizes)
    first = build_random(sizes, layers=range(0, 1), head=False)
    middle = build_random(sizes, layers=range(1, 3), embedding=False, head=False)
    last = build_random(sizes, layers=range(3, 4), embedding=False)
    if sizes.tie_word_embeddings:
        last.head.weight.data.copy_(first.embedding.weight.data)
    assert torch.equal(last(middle(first(tokens))), whole(tokens))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_a_stage_keeps_the_names_of_the_whole_model(changes: dict[str, Any]) -> None:
    sizes = make_sizes(**changes)
    specs = parameter_specs(sizes)
    middle = build_ours(sizes, layers=range(1, 3), embedding=False, head=False)
    last = build_ours(sizes, layers=[3], embedding=False)
    assert [name for name, _ in middle.named_parameters()] == [one.name for one in specs if one.layer in (1, 2)]
    assert set(dict(last.named_parameters())) == {one.name for one in specs if one.layer == 3 or one.part == "head"}


@pytest.mark.parametrize("name", FAMILIES)
def test_to_empty_unties_and_initialise_buffers_ties_again(name: str) -> None:
    sizes = make_sizes(family=name, tie_word_embeddings=True)
    model = build_ours(sizes)
    assert model.head.weight is model.embedding.weight
    model.to_empty(device="cpu")
    model.initialise_buffers()
    assert model.head.weight is model.embedding.weight


def test_rotary_tables_are_fp32_whatever_the_weights_are_and_shorter_on_request() -> None:
    sizes = make_sizes(max_position_embeddings=4096)
    model = build_ours(sizes, sequence_length=32)
    assert model.rotary.cos.shape == (32, 4)
    assert model.rotary.cos.dtype == torch.float32
    whole = build_ours(sizes)
    assert torch.equal(whole.rotary.sin[:32], model.rotary.sin)


def test_angles_are_computed_in_fp32_even_in_a_bf16_model() -> None:
    """BF16 angles would be off by radians from position 256 on; rounding the cosine itself costs 2^-9."""
    sizes = make_sizes(max_position_embeddings=4096)
    exact, rounded = build_ours(sizes, torch.float64), build_ours(sizes, torch.bfloat16)
    difference = (exact.rotary.cos - rounded.rotary.cos.double()).abs().max()
    assert difference < 2**-8


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_given_positions_are_used_and_default_to_counting_from_zero(changes: dict[str, Any]) -> None:
    sizes = make_sizes(**changes)
    model, tokens = build_random(sizes), tokens_of(sizes, 2, 16)
    plain = model(tokens)
    assert torch.equal(model(tokens, positions=torch.arange(16)), plain)
    assert torch.equal(model(tokens, positions=torch.arange(16).expand(2, 16)), plain)
    spread = model(tokens, positions=3 * torch.arange(16))
    assert (spread - plain).abs().max() > 1e-3


def test_rotary_attention_depends_on_distances_only() -> None:
    sizes = make_sizes()
    model, tokens = build_random(sizes), tokens_of(sizes, 1, 16)
    torch.testing.assert_close(model(tokens, positions=torch.arange(16) + 40), model(tokens), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_no_token_sees_a_later_one(changes: dict[str, Any]) -> None:
    sizes = make_sizes(**changes)
    model, tokens = build_random(sizes), tokens_of(sizes, 1, 16)
    changed = tokens.clone()
    changed[0, 9] = (tokens[0, 9] + 1) % sizes.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sequence_longer_than_the_positions_is_refused_in_words(name: str) -> None:
    sizes = make_sizes(family=name)
    with pytest.raises(ValueError, match="sequence of 65 tokens is longer than the 64 positions"):
        build_random(sizes)(tokens_of(sizes, 1, 65))


@pytest.mark.parametrize("window", [None, 1, 5, 16, 40])
def test_attention_core_equals_the_written_out_softmax(window: int | None) -> None:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(2, 16, 6, 8, dtype=torch.float64, generator=generator)
    key, value = (torch.randn(2, 16, 3, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    expected = torch.zeros_like(query)
    for head in range(6):
        for i in range(16):
            seen = slice(0 if window is None else max(0, i - window + 1), i + 1)
            scores = torch.einsum("bd,bjd->bj", query[:, i, head], key[:, seen, head // 2]) / 8**0.5
            expected[:, i, head] = torch.einsum("bj,bjd->bd", scores.softmax(-1), value[:, seen, head // 2])
    torch.testing.assert_close(AttentionCore(window, 0.0)(query, key, value), expected)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_halves_of_the_heads_and_features_add_up_to_the_whole_block(changes: dict[str, Any]) -> None:
    """What tensor parallelism relies on: cut every projection as its spec says, run, add. No rank count is told."""
    sizes = make_sizes(**changes)
    whole = build_random(sizes, layers=[0], embedding=False, head=False)
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(2, 9, sizes.hidden_size, dtype=torch.float64, generator=generator)
    dims = {one.name: one.tensor_dim for one in parameter_specs(sizes)}
    for branch in ("attention", "mlp"):
        arguments = {"rotary": whole.rotary(None)} if branch == "attention" and sizes.family == "llama" else {}
        expected = getattr(whole.layers["0"], branch)(hidden, **arguments)
        total = torch.zeros_like(expected)
        for half in range(2):
            part = build_random(sizes, layers=[0], embedding=False, head=False)
            module = getattr(part.layers["0"], branch)
            for name, parameter in module.named_parameters():
                dim = dims[f"layers.0.{branch}.{name}"]
                if dim is not None:
                    parameter.data = parameter.data.chunk(2, dim)[half].clone()
                elif half == 1:
                    parameter.data.zero_()  # the bias of a rowwise product is added once
            total += module(hidden, **arguments)
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


def test_rms_norm_is_computed_in_fp32_under_bf16() -> None:
    """Within one rounding of the FP64 formula, where a BF16 sum of 4096 squares would be off by per cents."""
    norm = nn.RMSNorm(4096, eps=1e-5, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(6)
    hidden = (30 * torch.randn(8, 4096, generator=generator)).bfloat16()
    exact = functional.rms_norm(hidden.double(), (4096,), norm.weight.double(), 1e-5)
    relative = ((norm(hidden).double() - exact) / exact).abs().max()
    assert relative <= 2**-8


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("key", ["attention_dropout", "resid_pdrop"])
def test_dropout_acts_in_training_only(name: str, key: str) -> None:
    sizes = make_sizes(family=name, **{key: 0.5})
    model, tokens = build_random(sizes), tokens_of(sizes, 1, 16)
    plain = build_random(make_sizes(family=name))(tokens)
    assert torch.equal(model.eval()(tokens), plain)
    torch.manual_seed(0)
    first, second = model.train()(tokens), model(tokens)
    assert not torch.equal(first, plain)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", FAMILIES)
def test_without_dropout_training_and_evaluation_are_the_same_computation(name: str) -> None:
    sizes = make_sizes(family=name)
    model, tokens = build_random(sizes), tokens_of(sizes, 1, 16)
    assert torch.equal(model.train()(tokens), model.eval()(tokens))


@pytest.mark.parametrize("name", FAMILIES)
def test_model_code_knows_no_rank_group_or_degree(name: str) -> None:
    """The model is written for one device; what is cut is decided outside (`sharding.py` is data for it)."""
    files = [f"{name}/module.py", *(f"layers/{path.name}" for path in (MODELS / "layers").glob("*.py"))]
    source = "".join((MODELS / file).read_text() for file in files)
    code = re.sub(r'"""[\s\S]*?"""|#.*', "", source)
    assert re.findall(r"\b(rank|world|group|mesh|degree|distributed|DTensor)\b", code) == []


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_whole_model_is_one_graph_for_the_compiler(changes: dict[str, Any]) -> None:
    sizes = make_sizes(num_hidden_layers=1, **changes)
    model, tokens = build_random(sizes), tokens_of(sizes, 2, 16)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(tokens), model(tokens))
