"""Every plan is the same training: the engine agrees with plain torch on one process."""

from __future__ import annotations

import pytest
import torch

from models.spec import parameter_specs
from orchestrator.engine.initialise import fill
from tests.engine.gloo import TIMEOUT_SECONDS, on_ranks
from tests.engine.parity import Case, RankTrace, expected, run_cases, together
from tests.engine.parity_cases import ALL, CASES, FAST
from tests.engine.reference import Trace

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, tuple[list[RankTrace], Trace]]:
    """By case of this test run: what each rank found, and what the reference found."""
    chosen = {item.callspec.params["one"].name for item in request.session.items if "one" in _parameters(item)}
    found: dict[str, tuple[list[RankTrace], Trace]] = {}
    for world, every in CASES.items():
        cases = [one for one in every if one.name in chosen]
        limit = TIMEOUT_SECONDS + 30 * len(cases)
        by_rank = on_ranks(world, run_cases, cases, limit_seconds=limit) if cases else []
        for index, one in enumerate(cases):
            ranks = [cases_of_rank[index] for cases_of_rank in by_rank]
            found[one.name] = (ranks, expected(one, together(ranks)[0]))
    return found


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def tolerance(one: Case) -> float:
    return 1e-9 if one.double else 1e-5


def marked(cases: list[Case]) -> list[object]:
    return [pytest.param(one, id=one.name, marks=() if one.name in FAST else pytest.mark.slow) for one in cases]


every_case = pytest.mark.parametrize("one", marked(ALL))


@every_case
def test_initial_weights_are_those_of_one_process_bit_for_bit(
    one: Case, outcomes: dict[str, tuple[list[RankTrace], Trace]]
) -> None:
    config, generator = one.plan().config, torch.Generator()
    found = together(outcomes[one.name][0])[0]
    specs = [spec for spec in parameter_specs(config.model) if spec.tied_to is None]
    assert set(found) == {spec.name for spec in specs}
    for spec in specs:
        whole = torch.empty(spec.shape)
        fill(whole, [0] * len(spec.shape), spec, config.training.seed, generator)
        assert torch.equal(found[spec.name], whole.to(found[spec.name].dtype)), spec.name


@every_case
def test_losses_agree_with_plain_torch(one: Case, outcomes: dict[str, tuple[list[RankTrace], Trace]]) -> None:
    ranks, reference = outcomes[one.name]
    assert ranks[0].losses == pytest.approx(reference.losses, abs=tolerance(one))


@every_case
def test_every_gradient_agrees_with_plain_torch(one: Case, outcomes: dict[str, tuple[list[RankTrace], Trace]]) -> None:
    ranks, reference = outcomes[one.name]
    for found, wanted in zip(together(ranks)[1].gradients, reference.gradients, strict=True):
        assert set(found) == set(wanted)
        model_largest = max(gradient.abs().max().item() for gradient in wanted.values())
        for name, gradient in wanted.items():
            largest = gradient.abs().max().item()
            # What cancels in a gradient was of the model's own scale; a small one keeps that rounding. In FP64 only
            # what is nothing but rounding needs it (the bias of keys shifts all scores of a query alike).
            largest = max(largest, (1e-6 if one.double else 1e-2) * model_largest, 1e-30)
            assert (found[name] - gradient).abs().max().item() / largest < tolerance(one), name


@every_case
def test_gradient_norm_is_that_of_plain_torch_and_the_same_on_every_rank(
    one: Case, outcomes: dict[str, tuple[list[RankTrace], Trace]]
) -> None:
    ranks, reference = outcomes[one.name]
    assert ranks[0].norms == pytest.approx(reference.norms, rel=tolerance(one))
    assert all(rank.norms == ranks[0].norms for rank in ranks)


@every_case
def test_weights_agree_with_plain_torch_and_bit_for_bit_between_ranks(
    one: Case, outcomes: dict[str, tuple[list[RankTrace], Trace]]
) -> None:
    ranks, reference = outcomes[one.name]
    found = together(ranks)[1].weights
    for name, weight in reference.weights.items():
        torch.testing.assert_close(found[name], weight, atol=tolerance(one), rtol=tolerance(one))


@pytest.mark.parametrize("one", marked([one for one in ALL if one.mask != "all empty"]))
def test_the_five_steps_really_learn(one: Case, outcomes: dict[str, tuple[list[RankTrace], Trace]]) -> None:
    losses = outcomes[one.name][1].losses
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("one", marked([one for one in ALL if one.recipe.clip is not None]))
def test_clipping_is_at_work_where_it_is_asked_for(
    one: Case, outcomes: dict[str, tuple[list[RankTrace], Trace]]
) -> None:
    assert one.recipe.clip is not None
    assert max(outcomes[one.name][1].norms) > one.recipe.clip
