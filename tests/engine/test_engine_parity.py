"""Every plan is the same training: the engine agrees with plain torch on one process."""

from __future__ import annotations

import pytest
import torch

from tests.engine.gloo import on_ranks
from tests.engine.parity import Case, expected, run_cases
from tests.engine.reference import PLAIN, Recipe, Trace

pytestmark = pytest.mark.torch

CLIPPED = Recipe(clip=1.0)
GPT = {"model__family": "gpt", "model__num_key_value_heads": None}
TIED = {"model__tie_word_embeddings": True}


def case(name: str, mask: str = "none", recipe: Recipe = PLAIN, **changes: object) -> Case:
    return Case(name, dict(changes), mask, recipe)  # type: ignore[arg-type]


def zero(data: int, stage: int) -> dict[str, object]:
    return {"parallel__data": data, "parallel__zero_stage": stage, "training__micro_batch_size": 1}


def recompute(kind: str) -> dict[str, object]:
    return {"training__activation_checkpointing": kind}


CASES: dict[int, list[Case]] = {
    1: [
        case("whole batch at once", training__micro_batch_size=8),
        case("accumulation", training__micro_batch_size=2, recipe=CLIPPED),
        case("tied", mask="ragged", **TIED),
        case("no valid token at all", mask="all empty"),
    ],
    2: [
        case("data 2", parallel__data=2, training__micro_batch_size=4),
        case("data 2, accumulation 4", "ragged", CLIPPED, parallel__data=2, training__micro_batch_size=1),
        case("data 2, tied", "ragged", parallel__data=2, **TIED),
        case("data 2, tied, accumulation 4", "ragged", CLIPPED, parallel__data=2, training__micro_batch_size=1, **TIED),
        case("data 2, one rank without a valid token", "first rank empty", CLIPPED, parallel__data=2),
        case("data 2, no valid token at all", "all empty", parallel__data=2),
        *(
            case(f"ZeRO-{stage}", "ragged", **(zero(2, stage) | {"training__micro_batch_size": 4}))
            for stage in (1, 2, 3)
        ),
        *(
            case(f"ZeRO-{stage}, accumulation 4, tied", "ragged", CLIPPED, **zero(2, stage), **TIED)
            for stage in (1, 2, 3)
        ),
        *(
            case(f"ZeRO-{stage}, one rank without a valid token", "first rank empty", CLIPPED, **zero(2, stage))
            for stage in (1, 2, 3)
        ),
        case("data 2, offload", parallel__data=2, parallel__offload="all"),
        case("gpt", "ragged", CLIPPED, parallel__data=2, **GPT),
        case("gpt, tied, ZeRO-3, accumulation 4", "ragged", **zero(2, 3), **GPT, **TIED, **recompute("selective")),
        case("full recompute", "ragged", CLIPPED, parallel__data=2, training__activation_checkpointing="full"),
        case("selective recompute", parallel__data=2, training__activation_checkpointing="selective"),
        *(
            case(f"ZeRO-{stage}, {kind} recompute, accumulation 4", "ragged", **zero(2, stage), **recompute(kind))
            for stage, kind in ((1, "selective"), (2, "full"), (3, "full"), (3, "selective"))
        ),
        case("ZeRO-3, offload", "ragged", CLIPPED, **zero(2, 3), parallel__offload="all"),
    ],
    4: [
        *(
            case(f"hybrid: ZeRO-{stage} in groups of 2", "ragged", CLIPPED, **zero(4, stage), parallel__zero_group=2)
            for stage in (1, 2, 3)
        ),
        case("data 4", "ragged", CLIPPED, parallel__data=4, training__micro_batch_size=1),
        case("data 4, one rank without a valid token", "first rank empty", parallel__data=4),
    ],
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[list[Trace], Trace]]:
    """By case: what each rank found, and what the reference found."""
    found: dict[str, tuple[list[Trace], Trace]] = {}
    for world, cases in CASES.items():
        by_rank = on_ranks(world, run_cases, cases)
        for index, one in enumerate(cases):
            initial = by_rank[0][index][0]
            found[one.name] = ([ranks[index][1] for ranks in by_rank], expected(one, initial))
    return found


ALL = [one for cases in CASES.values() for one in cases]
every_case = pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)


@every_case
def test_losses_agree_with_plain_torch(one: Case, outcomes: dict[str, tuple[list[Trace], Trace]]) -> None:
    ranks, reference = outcomes[one.name]
    assert ranks[0].losses == pytest.approx(reference.losses, abs=1e-5)


@every_case
def test_every_gradient_agrees_with_plain_torch(one: Case, outcomes: dict[str, tuple[list[Trace], Trace]]) -> None:
    ranks, reference = outcomes[one.name]
    for found, wanted in zip(ranks[0].gradients, reference.gradients, strict=True):
        assert set(found) == set(wanted)
        model_largest = max(gradient.abs().max().item() for gradient in wanted.values())
        for name, gradient in wanted.items():
            largest = gradient.abs().max().item()
            if largest <= 1e-6 * model_largest:
                # Zero but for rounding (the bias of keys shifts all scores of a query alike): no scale of its own.
                largest = max(model_largest, 1e-12)
            assert (found[name] - gradient).abs().max().item() / largest < 1e-5, name


@every_case
def test_gradient_norm_is_that_of_plain_torch_and_the_same_on_every_rank(
    one: Case, outcomes: dict[str, tuple[list[Trace], Trace]]
) -> None:
    ranks, reference = outcomes[one.name]
    assert ranks[0].norms == pytest.approx(reference.norms, rel=1e-5)
    assert all(rank.norms == ranks[0].norms for rank in ranks)


@every_case
def test_weights_agree_with_plain_torch_and_bit_for_bit_between_ranks(
    one: Case, outcomes: dict[str, tuple[list[Trace], Trace]]
) -> None:
    ranks, reference = outcomes[one.name]
    for name, weight in reference.weights.items():
        torch.testing.assert_close(ranks[0].weights[name], weight, atol=1e-5, rtol=1e-5)
        assert all(torch.equal(rank.weights[name], ranks[0].weights[name]) for rank in ranks)


@pytest.mark.parametrize("one", [one for one in ALL if one.mask != "all empty"], ids=lambda one: one.name)
def test_the_five_steps_really_learn(one: Case, outcomes: dict[str, tuple[list[Trace], Trace]]) -> None:
    losses = outcomes[one.name][1].losses
    assert losses[-1] < 0.9 * losses[0]


def test_clipping_is_at_work_where_it_is_asked_for(outcomes: dict[str, tuple[list[Trace], Trace]]) -> None:
    for one in ALL:
        if one.recipe.clip is not None:
            assert max(outcomes[one.name][1].norms) > one.recipe.clip, one.name
