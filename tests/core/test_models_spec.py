"""Parameters, counts, FLOPs and sharding words of the model families, as pure arithmetic."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models import spec
from models.registry import FAMILIES, family
from orchestrator.config.schema.model import ModelConfig, RopeScaling

with (Path(__file__).parent / "data" / "models_parameter_counts.csv").open() as table:
    PUBLISHED = list(csv.DictReader(table))


def sizes(**changes: Any) -> ModelConfig:
    small: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "vocab_size": 101,
        "max_position_embeddings": 64,
    }
    return ModelConfig(**(small | changes))


def published_sizes(row: dict[str, str]) -> ModelConfig:
    return ModelConfig(
        family=row["family"],
        hidden_size=int(row["hidden"]),
        intermediate_size=int(row["ffn"]),
        num_hidden_layers=int(row["layers"]),
        num_attention_heads=int(row["heads"]),
        num_key_value_heads=int(row["kv_heads"]),
        vocab_size=int(row["vocab"]),
        max_position_embeddings=int(row["positions"]) or 2048,
        tie_word_embeddings=row["tied"] == "1",
    )


@pytest.mark.parametrize("row", PUBLISHED, ids=[row["model"] for row in PUBLISHED])
def test_parameter_count_is_exactly_the_published_one(row: dict[str, str]) -> None:
    assert spec.parameter_count(published_sizes(row)) == int(row["parameters"])


def test_matmul_parameters_leave_out_the_lookup_and_count_a_tied_head() -> None:
    untied, tied = sizes(), sizes(tie_word_embeddings=True)
    blocks = 3 * (4 * 48 * 48 + 3 * 48 * 80)
    assert spec.matmul_parameters(untied) == blocks + 101 * 48
    assert spec.matmul_parameters(tied) == spec.matmul_parameters(untied)
    assert spec.parameter_count(untied) - spec.parameter_count(tied) == 101 * 48


def test_matmul_parameters_leave_out_learned_positions_and_biases() -> None:
    assert spec.matmul_parameters(sizes(family="gpt")) == 3 * (4 * 48 * 48 + 2 * 48 * 80) + 101 * 48


@pytest.mark.parametrize(
    ("changes", "attention"),
    [
        ({}, 12 * 3 * 48 * 32),
        ({"num_key_value_heads": 2}, 12 * 3 * 48 * 32),
        ({"head_dim": 16}, 12 * 3 * (6 * 16) * 32),
        ({"sliding_window": 8}, 12 * 3 * 48 * 32),
    ],
    ids=["plain", "grouped queries", "own head width", "window not deducted"],
)
def test_flops_are_six_a_matmul_parameter_plus_full_attention(changes: dict[str, Any], attention: int) -> None:
    model = sizes(**changes)
    assert spec.flops_per_token(model, 32) == 6 * spec.matmul_parameters(model) + attention


def test_llama_7b_costs_the_flops_of_the_palm_formula() -> None:
    row = next(row for row in PUBLISHED if row["model"] == "llama1-7b")
    matmul = 6_738_415_616 - 32000 * 4096 - (2 * 32 + 1) * 4096
    assert spec.flops_per_token(published_sizes(row), 2048) == 6 * matmul + 12 * 32 * 4096 * 2048


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
class TestEverySpec:
    def test_names_are_unique(self, name: str, tied: bool) -> None:
        names = [one.name for one in self.specs(name, tied)]
        assert len(set(names)) == len(names)

    def test_decay_applies_to_matrices_and_never_to_norms_or_biases(self, name: str, tied: bool) -> None:
        for one in self.specs(name, tied):
            assert one.decay == (len(one.shape) == 2), one.name

    def test_norms_start_at_one_biases_at_zero_and_matrices_at_random(self, name: str, tied: bool) -> None:
        for one in self.specs(name, tied):
            expected = "zeros" if one.name.endswith("bias") else "ones" if "norm" in one.name else "normal"
            assert one.init.kind == expected, one.name

    def test_projections_into_the_residual_stream_start_smaller_by_the_root_of_twice_the_layers(
        self, name: str, tied: bool
    ) -> None:
        for one in self.specs(name, tied):
            if one.init.kind == "normal":
                residual = one.name.endswith(("o_proj.weight", "down_proj.weight"))
                assert one.init.std == pytest.approx(0.02 / math.sqrt(6) if residual else 0.02), one.name

    def test_layer_and_part_say_where_the_parameter_lives(self, name: str, tied: bool) -> None:
        for one in self.specs(name, tied):
            inside = one.name.startswith("layers.")
            assert (one.part == "block") == inside
            assert one.layer == (int(one.name.split(".")[1]) if inside else None)

    def test_only_a_tied_head_shares_values(self, name: str, tied: bool) -> None:
        shared = [(one.name, one.tied_to) for one in self.specs(name, tied) if one.tied_to is not None]
        assert shared == ([("head.weight", "embedding.weight")] if tied else [])

    def test_the_cut_dimension_follows_from_the_style(self, name: str, tied: bool) -> None:
        """Colwise cuts rows and bias, rowwise cuts columns, vocabulary cuts rows, all else is replicated."""
        styles = dict(family(name).sharding_table(sizes(family=name)).styles)
        for one in self.specs(name, tied):
            module, kind = one.name.rsplit(".", 1)
            style = styles[module if one.layer is None else ".".join(["layers", "*", *module.split(".")[2:]])]
            by_style = {
                "colwise": 0,
                "rowwise": 1 if kind == "weight" else None,
                "vocabulary_embedding": 0,
                "vocabulary_head": 0,
                "norm": None,
                "scatter_output": None,
            }
            assert one.tensor_dim == by_style[style], one.name

    def test_every_part_of_the_model_is_in_exactly_one_sharding_unit(self, name: str, tied: bool) -> None:
        table = family(name).sharding_table(sizes(family=name, tie_word_embeddings=tied))
        members = [module for unit in table.units for module in unit]
        assert sorted(members) == sorted([*table.embedding, f"{table.layers}.*", *table.head])
        together = any({"embedding", "head"} <= set(unit) for unit in table.units)
        assert together == tied

    @staticmethod
    def specs(name: str, tied: bool) -> tuple[spec.ParameterSpec, ...]:
        return spec.parameter_specs(sizes(family=name, tie_word_embeddings=tied))


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        (None, None, []),
        (True, None, ["q_proj", "k_proj", "v_proj", "o_proj"]),
        (True, False, ["q_proj", "k_proj", "v_proj"]),
        (False, True, ["o_proj"]),
    ],
)
def test_llama_has_the_attention_biases_asked_for(inner: bool | None, outer: bool | None, expected: list[str]) -> None:
    model = sizes(attention_bias=inner, attention_output_bias=outer, num_hidden_layers=1)
    biased = [one.name.split(".")[-2] for one in spec.parameter_specs(model) if one.name.endswith("bias")]
    assert biased == expected


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 5}, "head_dim"),
        (
            {"rope_scaling": RopeScaling(rope_type="llama3", factor=8, low_freq_factor=4, high_freq_factor=4)},
            "rope_scaling.high_freq_factor",
        ),
        ({"family": "gpt", "num_key_value_heads": 2}, "num_key_value_heads"),
        ({"family": "gpt", "sliding_window": 8}, "sliding_window"),
        ({"family": "gpt", "rope_scaling": RopeScaling(rope_type="linear", factor=2)}, "rope_scaling"),
        ({"family": "gpt", "attention_bias": False}, "attention_bias"),
        ({"family": "gpt", "attention_output_bias": False}, "attention_output_bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_sizes_that_cannot_be_built_are_named_with_a_remedy(changes: dict[str, Any], key: str) -> None:
    model = sizes(**changes)
    (problem,) = family(model.family).size_problems(model)
    assert problem.key == key
    assert problem.message
    assert problem.fix


@pytest.mark.parametrize("name", FAMILIES)
def test_ordinary_sizes_have_no_problem(name: str) -> None:
    assert family(name).size_problems(sizes(family=name)) == ()


def test_the_remedy_for_key_value_heads_lists_the_divisors() -> None:
    (problem,) = family("llama").size_problems(sizes(num_key_value_heads=4))
    assert "1, 2, 3, 6" in problem.fix


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match=r"mamba.*gpt, llama"):
        family("mamba")


def test_the_pure_half_imports_neither_torch_nor_the_orchestrator() -> None:
    heavy = ("torch", "ray", "orchestrator")
    program = f"import sys, models.spec, models.registry; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
