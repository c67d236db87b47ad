"""The sharding words mean what they say: cut over two ranks by the table alone, a model learns the same in FP64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.engine.gloo import on_ranks
from tests.engine.models_tensor_parallel import largest_differences
from tests.engine.small_models import make_sizes

pytestmark = pytest.mark.torch

MODELS: dict[str, dict[str, Any]] = {
    "llama, grouped queries": {"num_key_value_heads": 2},
    "llama, tied, biased": {"tie_word_embeddings": True, "attention_bias": True},
    "gpt": {"family": "gpt"},
    "gpt, tied": {"family": "gpt", "tie_word_embeddings": True},
}
CASES = {
    f"{name}, sequence {'cut' if cut else 'whole'}": (changes, cut)
    for (name, changes), cut in product(MODELS.items(), (False, True))
}
"""The vocabulary has 101 rows: two ranks hold 51 and 50."""


@pytest.fixture(scope="module")
def differences() -> dict[str, dict[str, float]]:
    cases = [(make_sizes(**changes), sequence_parallel) for changes, sequence_parallel in CASES.values()]
    first, second = on_ranks(2, largest_differences, cases)
    assert first == second
    return dict(zip(CASES, first, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_a_model_cut_by_its_table_has_the_loss_and_gradients_of_the_whole(
    case: str, differences: dict[str, dict[str, float]]
) -> None:
    worst = max(differences[case], key=differences[case].__getitem__)
    assert differences[case][worst] <= 1e-12, worst
