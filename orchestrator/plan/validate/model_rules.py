"""Rules of the model alone: they hold whatever the hardware and the split are."""

from __future__ import annotations

from collections.abc import Iterator

from models.registry import family
from orchestrator.errors import Problem
from orchestrator.plan.batch import divisors, nearest, nearest_multiples
from orchestrator.plan.facts import Facts
from orchestrator.plan.validate.wording import one_of


def heads_divide_hidden_size(facts: Facts) -> Iterator[Problem]:
    """Without `head_dim`, a head's width is hidden_size / heads and must be whole."""
    model = facts.config.model
    hidden, heads = model.hidden_size, model.num_attention_heads
    if model.head_dim is None and hidden % heads:
        yield Problem(
            "model.num_attention_heads",
            f"{heads} heads do not divide model.hidden_size={hidden}, so a head's width is not whole.",
            f"Use {one_of(nearest(heads, divisors(hidden)))} heads, or model.hidden_size="
            f"{one_of(nearest_multiples(hidden, heads))}, or set model.head_dim.",
        )


def key_value_heads_divide_heads(facts: Facts) -> Iterator[Problem]:
    """Grouped-query attention: every key/value head serves the same number of query heads."""
    model = facts.config.model
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    if groups is not None and heads % groups:
        yield Problem(
            "model.num_key_value_heads",
            f"{groups} key/value heads cannot be shared evenly by {heads} query heads.",
            f"Use a divisor of {heads}: {one_of(nearest(groups, divisors(heads)))} are the nearest.",
        )


def family_can_build_it(facts: Facts) -> Iterator[Problem]:
    """What the family itself says about sizes (even heads for rotary positions, no grouped queries in GPT-2 ...)."""
    model = facts.config.model
    reported = {
        problem.key for rule in (heads_divide_hidden_size, key_value_heads_divide_heads) for problem in rule(facts)
    }
    if "model.num_attention_heads" in reported:
        reported.add("model.head_dim")  # the head's width is not known
    for problem in family(model.family).size_problems(model):
        key = f"model.{problem.key}"
        if key not in reported:
            yield Problem(key, problem.message, problem.fix)


def sequence_fits_positions(facts: Facts) -> Iterator[Problem]:
    """The model must be able to take the sequence."""
    sequence, longest = facts.config.training.sequence_length, facts.config.model.max_position_embeddings
    if sequence > longest:
        yield Problem(
            "training.sequence_length",
            f"Sequences of {sequence} tokens are longer than the model's max_position_embeddings={longest}.",
            f"Use training.sequence_length={longest} or less, or raise model.max_position_embeddings"
            + ("." if facts.config.model.family == "gpt" else " (with model.rope_scaling where the weights need it)."),
        )


RULES = (
    heads_divide_hidden_size,
    key_value_heads_divide_heads,
    family_can_build_it,
    sequence_fits_positions,
)
