"""Action lists and what is read from them: completeness, order, time, bubble, kept activations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.plan import timeline
from orchestrator.plan.schedules import Action, Shape, action_lists
from orchestrator.plan.stages import stages_of_rank
from orchestrator.plan.timeline import ActionSeconds, Kept, peak_kept, pipeline_timeline, simulate
from tests.core import plan_cases as cases


@st.composite
def schedule_shapes(draw: st.DrawFn, rounds: int = 3) -> Shape:
    """Shapes that the rules allow."""
    name = draw(
        st.sampled_from(
            ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"]
        )
    )
    pipeline = draw(st.integers(2, 6))
    virtual = {"gpipe": 1, "1f1b": 1, "zbv_zero_bubble": 2, "dualpipev": 2}.get(name) or draw(st.integers(1, 3))
    fewest = {"1f1b": pipeline, "dualpipev": 2 * pipeline}.get(name, 1)
    count = draw(st.integers(fewest, rounds * pipeline + 3))
    if name.startswith("interleaved") and count % max(1, count // pipeline):
        count = count // pipeline * pipeline
    return Shape(name, pipeline, virtual, count)


def _alike(pipeline: int, virtual: int) -> ActionSeconds:
    one = (1.0 / virtual,) * (pipeline * virtual)
    return ActionSeconds(one, one, one)


@cases.examples(25)
@given(schedule_shapes())
def test_every_stage_does_every_micro_batch_once_in_order(shape: Shape) -> None:
    name, pipeline, virtual, count = shape
    for rank, actions in enumerate(action_lists(shape)):
        stages = stages_of_rank(rank, pipeline, virtual, name)
        done: dict[tuple[int, str], list[int]] = {}
        for action in actions:
            for kind in "IW" if action.kind == "B" else action.kind:
                done.setdefault((action.stage, kind), []).append(action.micro_batch)
        assert set(done) == {(stage, kind) for stage in stages for kind in "FIW"}
        assert all(numbers == list(range(count)) for (_, kind), numbers in done.items() if kind != "W")
        assert all(sorted(numbers) == list(range(count)) for numbers in done.values())


@cases.examples(25)
@given(schedule_shapes())
def test_no_backward_precedes_its_forward_and_no_weights_their_inputs(shape: Shape) -> None:
    for actions in action_lists(shape):
        seen: set[Action] = set()
        for action in actions:
            if action.kind in "BI":
                assert action._replace(kind="F") in {done._replace(overlapped=False) for done in seen}
            if action.kind == "W":
                assert action._replace(kind="I") in seen
            seen.add(action)


@cases.examples(25)
@given(schedule_shapes())
def test_no_schedule_waits_for_ever(shape: Shape) -> None:
    _, pipeline, virtual, count = shape
    whole = simulate(action_lists(shape), _alike(pipeline, virtual))
    assert whole.seconds >= 3 * count
    assert whole.busy_seconds == pytest.approx((3.0 * count,) * pipeline)


def test_a_list_that_is_no_schedule_is_refused() -> None:
    backward_first = ((Action(0, "B", 0), Action(0, "F", 0)),)
    with pytest.raises(ValueError, match="for ever"):
        simulate(backward_first, ActionSeconds((1.0,), (1.0,), (1.0,)))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@cases.examples(25)
@given(pipeline=st.integers(1, 8), extra=st.integers(0, 30))
def test_the_bubble_of_gpipe_and_1f1b_is_p_minus_1_over_m(name: str, pipeline: int, extra: int) -> None:
    count = pipeline + extra
    line = pipeline_timeline(Shape(name, pipeline, 1, count), _alike(pipeline, 1))
    busy = line.busy_seconds[0]
    assert (line.seconds - busy) / busy == pytest.approx((pipeline - 1) / count)


@cases.examples(25)
@given(pipeline=st.integers(2, 6), virtual=st.integers(2, 4), rounds=st.integers(1, 5))
def test_interleaving_divides_the_bubble_by_the_virtual_stages(pipeline: int, virtual: int, rounds: int) -> None:
    count = pipeline * rounds
    line = pipeline_timeline(Shape("interleaved_1f1b", pipeline, virtual, count), _alike(pipeline, virtual))
    busy = line.busy_seconds[0]
    assert (line.seconds - busy) / busy == pytest.approx((pipeline - 1) / (virtual * count))


@pytest.mark.parametrize(("pipeline", "rounds"), [(2, 1), (3, 3), (4, 2), (6, 2)])
def test_zero_bubble_schedules_idle_less_than_1f1b(pipeline: int, rounds: int) -> None:
    count = 2 * pipeline * rounds
    plain = pipeline_timeline(Shape("1f1b", pipeline, 1, count), _alike(pipeline, 1))
    for name in ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"):
        line = pipeline_timeline(Shape(name, pipeline, 2, count), _alike(pipeline, 2))
        assert line.bubble_fraction < plain.bubble_fraction


def test_the_article_s_80_layers_over_8_gpus_leave_a_bubble_that_micro_batches_shrink() -> None:
    shares = [
        pipeline_timeline(Shape("1f1b", 8, 1, count), _alike(8, 1)).bubble_fraction for count in (8, 32, 128, 512)
    ]
    assert shares == pytest.approx([7 / 15, 7 / 39, 7 / 135, 7 / 519])


costs = st.floats(0.5, 2.0)


@cases.examples(25)
@given(st.data(), schedule_shapes(rounds=14))
def test_long_steps_are_continued_exactly_and_nearly_so_for_v_shapes(data: st.DataObject, shape: Shape) -> None:
    name, pipeline, virtual, _ = shape
    stages = pipeline * virtual
    many = st.tuples(*[costs] * stages)
    seconds = ActionSeconds(data.draw(many), data.draw(many), data.draw(many), hop=0.05)
    whole = simulate(action_lists(shape), seconds)
    short = pipeline_timeline(shape, seconds)
    tolerance = 0.03 if name in ("zbv_zero_bubble", "dualpipev") else 1e-3
    assert short.seconds == pytest.approx(whole.seconds, rel=tolerance)
    assert short.busy_seconds == pytest.approx(whole.busy_seconds)


@cases.examples(60)
@given(schedule_shapes(rounds=9), st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 4.0]))
def test_long_steps_of_alike_stages_are_continued_exactly(shape: Shape, ratio: float) -> None:
    stages = shape.pipeline * shape.virtual_stages
    seconds = ActionSeconds((1.0,) * stages, (ratio / 2,) * stages, (ratio / 2,) * stages)
    whole = simulate(action_lists(shape), seconds)
    short = pipeline_timeline(shape, seconds)
    assert short.seconds == pytest.approx(whole.seconds, rel=1e-12)
    assert short.busy_seconds == pytest.approx(whole.busy_seconds, rel=1e-12)


@cases.examples(25)
@given(schedule_shapes(rounds=12))
def test_kept_micro_batches_do_not_depend_on_the_length_of_the_step(shape: Shape) -> None:
    name, pipeline, virtual, count = shape
    for rank in range(pipeline):
        most = alive = 0
        for action in action_lists(shape)[rank]:
            alive += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, alive)
        kept = peak_kept(Shape(name, pipeline, virtual, count), rank, (1.0,) * virtual)
        assert sum(stage.whole + stage.weights_only for stage in kept) == most


@pytest.mark.parametrize(
    ("name", "virtual", "first", "last"),
    [
        ("gpipe", 1, 16, 16),
        ("1f1b", 1, 4, 1),
        ("interleaved_1f1b", 2, 11, 5),
        ("zbv_zero_bubble", 2, 8, 8),
        ("dualpipev", 2, 9, 9),
    ],
)
def test_kept_micro_batches_at_the_first_and_last_rank(name: str, virtual: int, first: int, last: int) -> None:
    kept = [peak_kept(Shape(name, 4, virtual, 16), rank, (1.0,) * virtual) for rank in (0, 3)]
    assert [sum(stage.whole + stage.weights_only for stage in rank) for rank in kept] == [first, last]


def test_the_peak_is_where_most_bytes_are_kept_not_most_micro_batches() -> None:
    even = peak_kept(Shape("zbv_zero_bubble", 4, 2, 16), 0, (1.0, 1.0))
    heavy_second = peak_kept(Shape("zbv_zero_bubble", 4, 2, 16), 0, (0.01, 1.0))
    assert even == (Kept(7, 0), Kept(1, 0))
    assert heavy_second[1].whole >= even[1].whole


def test_a_micro_batch_that_waits_for_weights_may_count_less() -> None:
    full = peak_kept(Shape("interleaved_zero_bubble", 4, 1, 16), 3, (1.0,), 1.0)
    less = peak_kept(Shape("interleaved_zero_bubble", 4, 1, 16), 3, (1.0,), 0.0)
    assert full[0].whole + full[0].weights_only > less[0].whole


def test_without_a_pipeline_one_micro_batch_is_kept_at_a_time() -> None:
    assert peak_kept(Shape("gpipe", 1, 1, 64), 0, (1.0,)) == (Kept(1, 0),)


def test_long_steps_cost_no_more_than_short_ones() -> None:
    shape = Shape("1f1b", 16, 1, 10**9)
    assert timeline.peak_kept(shape, 0, (1.0,)) == (Kept(16, 0),)
    line = pipeline_timeline(shape, _alike(16, 1))
    assert line.bubble_fraction == pytest.approx(15 / (10**9 + 15), rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "rank", "expected"),
    [
        # All forwards come first; the second stage's gradients are there while 31 of 32 are still kept.
        (
            Shape("interleaved_1f1b", 16, 2, 16),
            1,
            [((False, False), 32), ((False, True), 31), ((False, True), 16), ((True, True), 15)],
        ),
        (
            Shape("interleaved_1f1b", 16, 2, 16),
            15,
            [((False, False), 17), ((False, True), 17), ((False, True), 16), ((True, True), 15)],
        ),
        (Shape("1f1b", 4, 1, 16), 1, [((False,), 3), ((True,), 3)]),
        (Shape("1f1b", 4, 1, 4), 0, [((False,), 4), ((True,), 3)]),
        (Shape("gpipe", 4, 1, 6), 2, [((False,), 6), ((True,), 5)]),
        (Shape("gpipe", 1, 1, 1), 0, [((False,), 1)]),
        (Shape("gpipe", 1, 1, 3), 0, [((False,), 1), ((True,), 1)]),
    ],
)
def test_what_is_kept_at_most_while_the_same_stages_have_gradients(
    shape: Shape, rank: int, expected: list[tuple[tuple[bool, ...], int]]
) -> None:
    found = timeline.crests(shape, rank, (1.0,) * shape.virtual_stages)
    assert [(crest.begun, sum(kept.whole + kept.weights_only for kept in crest.kept)) for crest in found] == expected


def test_a_crest_after_which_as_much_is_kept_with_more_gradients_is_left_out() -> None:
    steady = timeline.highest_crests(Shape("interleaved_1f1b", 4, 2, 32), 0, (1.0, 1.0))
    assert [crest.begun for crest in steady] == [(True, True)]
    few = timeline.highest_crests(Shape("interleaved_1f1b", 16, 2, 16), 1, (1.0, 1.0))
    assert [crest.weight for crest in few] == [32, 31, 16, 15]


def test_a_stage_is_done_with_the_last_of_its_whole_backward_passes() -> None:
    few = timeline.crests(Shape("interleaved_1f1b", 16, 2, 16), 15, (1.0, 1.0))
    assert [crest.done for crest in few] == [(), (), (False, True), (False, True)]
    split = timeline.crests(Shape("zbv_zero_bubble", 4, 2, 8), 0, (1.0, 1.0))
    assert not any(crest.done for crest in split)


@given(schedule_shapes(), st.integers(0, 5))
def test_the_peak_is_the_highest_crest_and_stages_only_begin(shape: Shape, rank: int) -> None:
    weights = tuple(float(index + 1) for index in range(shape.virtual_stages))
    found = timeline.crests(shape, rank % shape.pipeline, weights)
    counts = [(sum(crest.begun), sum(crest.done)) for crest in found]
    assert counts == sorted(set(counts))
    peak = peak_kept(shape, rank % shape.pipeline, weights)
    assert (
        max(crest.weight for crest in found)
        <= sum(weight * (kept.whole + kept.weights_only) for weight, kept in zip(weights, peak, strict=True))
        * (1 + 1e-9)
        if shape.schedule not in ("gpipe", "1f1b")
        else peak == found[0].kept
    )
