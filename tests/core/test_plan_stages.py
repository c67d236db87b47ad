"""The pipeline cut."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.plan import stages
from orchestrator.plan.stages import StageCosts, as_ranges, balanced_counts, stage_costs, stages_of_rank
from tests.core import plan_cases as cases

SHAPES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 3), ("zbv_zero_bubble", 2), ("dualpipev", 2)]


@cases.examples(40)
@given(
    layers=st.integers(1, 200),
    pipeline=st.integers(1, 24),
    shape=st.sampled_from(SHAPES),
    embedding=st.floats(0, 5),
    head=st.floats(0, 5),
)
def test_layers_always_add_up(
    layers: int, pipeline: int, shape: tuple[str, int], embedding: float, head: float
) -> None:
    schedule, virtual = shape
    counts = balanced_counts(layers, pipeline, virtual, schedule, StageCosts(embedding, 1.0, head))
    if pipeline * virtual > layers:
        assert counts is None
        return
    assert counts is not None
    assert sum(counts) == layers
    assert len(counts) == pipeline * virtual
    assert min(counts) >= 1
    ranges = as_ranges(counts)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == layers
    assert all(before[1] == after[0] for before, after in pairwise(ranges))


def _busiest(counts: tuple[int, ...], pipeline: int, virtual: int, schedule: str, costs: StageCosts) -> float:
    work = [count * costs.layer for count in counts]
    work[0] += costs.embedding
    work[-1] += costs.head
    return max(
        sum(work[stage] for stage in stages_of_rank(rank, pipeline, virtual, schedule)) for rank in range(pipeline)
    )


@cases.examples(40)
@given(
    layers=st.integers(4, 9),
    shape=st.sampled_from([("1f1b", 1, 2), ("1f1b", 1, 3), ("interleaved_1f1b", 2, 2), ("zbv_zero_bubble", 2, 2)]),
    embedding=st.floats(0, 3),
    head=st.floats(0, 3),
)
def test_no_cut_is_better_balanced(layers: int, shape: tuple[str, int, int], embedding: float, head: float) -> None:
    schedule, virtual, pipeline = shape
    costs = StageCosts(embedding, 1.0, head)
    ours = balanced_counts(layers, pipeline, virtual, schedule, costs)
    assert ours is not None
    every = (counts for counts in product(range(1, layers + 1), repeat=pipeline * virtual) if sum(counts) == layers)
    best = min(_busiest(counts, pipeline, virtual, schedule, costs) for counts in every)
    assert _busiest(ours, pipeline, virtual, schedule, costs) == pytest.approx(best)


@cases.examples(40)
@given(st.integers(1, 12), st.sampled_from(SHAPES))
def test_every_stage_has_exactly_one_rank(pipeline: int, shape: tuple[str, int]) -> None:
    schedule, virtual = shape
    held = [stage for rank in range(pipeline) for stage in stages_of_rank(rank, pipeline, virtual, schedule)]
    assert sorted(held) == list(range(pipeline * virtual))


def test_a_v_puts_first_and_last_stage_on_rank_0() -> None:
    assert stages_of_rank(0, 4, 2, "dualpipev") == (0, 7)
    assert stages_of_rank(3, 4, 2, "dualpipev") == (3, 4)
    assert stages_of_rank(1, 4, 3, "interleaved_1f1b") == (1, 5, 9)


@pytest.mark.parametrize(("pipeline", "each"), [(8, 10), (4, 20), (2, 40)])
def test_80_layers_over_8_gpus_are_10_each(pipeline: int, each: int) -> None:
    config = cases.config(cases.LLAMA2_70B, parallel={"pipeline": pipeline})
    assert stages.cut(config) == as_ranges((each,) * pipeline)


def test_the_head_of_a_large_vocabulary_takes_layers_from_the_last_stage() -> None:
    config = cases.config(cases.LLAMA_7B, model_changes={"vocab_size": 256_000}, parallel={"pipeline": 4})
    cut = stages.cut(config)
    assert cut is not None
    sizes = [last - first for first, last in cut]
    costs = stage_costs(config.model, 4096, 1)
    assert costs.head > 4 * costs.layer
    assert sizes[-1] < min(sizes[:-1]) - 2


def test_126_layers_over_16_ranks_leave_first_and_last_one_short() -> None:
    sizes = {**cases.LLAMA2_70B, "num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248}
    sizes |= {"num_attention_heads": 128, "vocab_size": 128256, "max_position_embeddings": 8192}
    cut = stages.cut(cases.config(sizes, parallel={"pipeline": 16}))
    assert cut is not None
    # The cut that the Llama 3 report describes (arXiv:2407.21783, section 3.3.2).
    assert [last - first for first, last in cut] == [7, *[8] * 14, 7]


def test_a_list_of_layers_is_taken_as_it_is() -> None:
    config = cases.config(parallel={"pipeline": 3, "stage_layers": [2, 5, 1]})
    assert stages.cut(config) == ((0, 2), (2, 7), (7, 8))
