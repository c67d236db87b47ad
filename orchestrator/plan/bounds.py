"""The least bytes and seconds that a candidate of a search can need: what spares a search most of its evaluations.

Owns both bounds; never too much, so that nothing which fits or is fastest is left out (a test). Splits that differ only
in where states are kept share a place: its courses are bounded once. The figures themselves are `evaluate.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.plan.activations import BlockActivations, block_activations
from orchestrator.plan.collectives import collective_seconds
from orchestrator.plan.compute import block_seconds, head_seconds
from orchestrator.plan.constants import FITTED
from orchestrator.plan.evaluate import Evaluator
from orchestrator.plan.held import rank_states
from orchestrator.plan.schedules import SPLIT_BACKWARDS, Shape
from orchestrator.plan.search_space import SIMPLEST, Candidate, Course, Place, Recompute, Split, courses
from orchestrator.plan.stages import V_SHAPED, stages_of_rank
from orchestrator.plan.step_seconds import bubble_turns
from orchestrator.plan.timeline import peak_kept
from orchestrator.plan.traffic import context_transfers, tensor_transfers
from orchestrator.plan.work import Work

_LARGE_BYTES = 2.0**40
"""The reserve grows in proportion to what is used; its slope is read over a distance that floats resolve well."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """A course with what pipeline rank 0 needs for it at least."""

    course: Course
    activations: float
    """Bytes in the first block's backward, when the schedule keeps most."""
    all_gradients: bool
    """Whether all gradients are sure to exist by then."""
    states_of: tuple[int, bool, bool]
    """What its states follow from beside the split: layers, one micro-batch only, split backward passes."""


@dataclass(frozen=True, slots=True)
class _States:
    """Bytes of a rank's states at two moments."""

    at_the_end: float
    """With all gradients, when the last copies have been given back."""
    gathered: float
    """With all copies, without gradients."""
    gradients: float


@dataclass(frozen=True, slots=True)
class _Turn:
    """Seconds of one micro-batch: of one block, and of the head."""

    forward: float
    backward: float
    """With recomputation."""
    head_forward: float
    head_backward: float
    traffic: float
    """Tensor- and context-parallel traffic of one block that is not hidden."""

    def ratios(self, layers: int) -> tuple[float, ...]:
        """Every backward/forward ratio, in steps of a half, that a rank of at least `layers` layers can have, with or
        without the head."""
        block = self.backward / self.forward
        with_head = (layers * self.backward + self.head_backward) / (layers * self.forward + self.head_forward)
        low, high = sorted((round(2 * block), round(2 * with_head)))
        return tuple(half / 2 for half in range(max(low, 1), high + 1))


class Bounds:
    """Bounds of the candidates of one evaluator."""

    def __init__(self, evaluate: Evaluator) -> None:
        self.evaluate = evaluate
        self.config = evaluate.config
        self._budget_bytes = _budget(evaluate)
        self._courses: dict[Place, tuple[Bounded, ...]] = {}
        self._fastest_first: dict[Place, tuple[tuple[float, Bounded], ...]] = {}
        self._states: dict[tuple[Split, tuple[int, bool, bool]], _States] = {}
        self._blocks: dict[tuple[int, int, int, Recompute], BlockActivations] = {}
        self._turns: dict[tuple[int, int, int, Recompute], _Turn] = {}
        self._fewest: dict[tuple[int, int, str, int], int] = {}

    def courses(self, split: Split) -> tuple[Bounded, ...]:
        """The courses of a split whose activations alone fit on pipeline rank 0."""
        if split.place not in self._courses:
            bounded = [self._bounded(split, course) for course in courses(self.config, split)]
            self._courses[split.place] = tuple(each for each in bounded if each.activations <= self._budget_bytes)
        return self._courses[split.place]

    def fastest_first(self, split: Split) -> tuple[tuple[float, Bounded], ...]:
        """(seconds that a step takes at least, course) for each of `courses`, in the order of the seconds."""
        if split.place not in self._fastest_first:
            timed = [(self.floor_seconds(Candidate(split, bounded.course)), bounded) for bounded in self.courses(split)]
            self._fastest_first[split.place] = tuple(sorted(timed, key=lambda each: each[0]))
        return self._fastest_first[split.place]

    def may_fit(self, split: Split, bounded: Bounded) -> bool:
        """Whether pipeline rank 0 may hold its states beside the activations."""
        states = self._rank_0_states(split, bounded)
        before = states.gathered + (states.gradients if bounded.all_gradients else 0.0)
        return max(states.at_the_end, before + bounded.activations) <= self._budget_bytes

    def _bounded(self, split: Split, course: Course) -> Bounded:
        count = self.evaluate.micro_batches(split, course.micro_batch_size)
        shape = Shape(course.schedule, split.pipeline, course.virtual_stages, count)
        cut = self.evaluate.cut(split.pipeline, course)
        stages = stages_of_rank(0, split.pipeline, course.virtual_stages, course.schedule)
        layers = [cut[stage][1] - cut[stage][0] for stage in stages]
        in_flight = [stage.whole + stage.weights_only for stage in peak_kept(shape, 0, (1.0,) * course.virtual_stages)]
        block = self._block(split, course.micro_batch_size, course.recompute)
        # In a V rank 0 holds the last stage as well, whose inputs may lie in the buffers that they came in.
        inputs = self._block(split, course.micro_batch_size, "full").kept if course.schedule in V_SHAPED else 0.0
        return Bounded(
            course,
            # In the first block's backward, what is kept is still there beside what that block works on.
            activations=sum(each * (held * block.kept - inputs) for each, held in zip(in_flight, layers, strict=True))
            + min(block.working, block.working_added),
            # Of several stages some may have no gradients yet.
            all_gradients=course.virtual_stages == 1 and count > max(in_flight),
            states_of=(sum(layers), count == 1, course.schedule in SPLIT_BACKWARDS),
        )

    def _block(self, split: Split, micro_batch_size: int, recompute: Recompute) -> BlockActivations:
        """Activations of one block and micro-batch."""
        key = (split.tensor, split.context, micro_batch_size, recompute)
        if key not in self._blocks:
            simple = Course("gpipe", 1, micro_batch_size, recompute)
            work = self.evaluate.work(Candidate(split, simple))
            self._blocks[key] = block_activations(work, self.evaluate.profile)
        return self._blocks[key]

    def _rank_0_states(self, split: Split, bounded: Bounded) -> _States:
        key = (split, bounded.states_of)
        if key not in self._states:
            work = self.evaluate.work(Candidate(split, bounded.course))
            states = rank_states(work, self.evaluate.profile, ((bounded.states_of[0], True, False),))
            kept = float(states.parameters + states.optimizer)
            gradients = 0.0 if split.offload else float(states.gradients)
            self._states[key] = _States(
                # The last block's own gradients come when its copies have gone.
                at_the_end=kept + max(gradients, gradients - states.last_gradients + states.gathered_last),
                gathered=kept + states.gathered,
                gradients=gradients,
            )
        return self._states[key]

    def floor_seconds(self, candidate: Candidate) -> float:
        """What the step takes at least: computation spread evenly over the pipeline, the traffic of its blocks on the
        rank with the fewest, and the bubble this leaves."""
        if not self.evaluate.device.computes:
            return 0.0
        split, course = candidate.split, candidate.course
        turn, layers = self._turn(candidate), self.config.model.num_hidden_layers
        count, idle = self.evaluate.micro_batches(split, course.micro_batch_size), 0.0
        if split.pipeline > 1:
            shape = Shape(course.schedule, split.pipeline, course.virtual_stages, count)
            idle = min(bubble_turns(shape, ratio) for ratio in turn.ratios(layers // split.pipeline))
        whole = layers * (turn.forward + turn.backward) + turn.head_forward + turn.head_backward
        traffic = turn.traffic * self._fewest_layers(split.pipeline, course) if turn.traffic else 0.0
        return (whole / split.pipeline + traffic) * (count + idle)

    def _turn(self, candidate: Candidate) -> _Turn:
        """Seconds of one micro-batch in one block and in the head."""
        split, course, evaluate = candidate.split, candidate.course, self.evaluate
        key = (split.tensor, split.context, course.micro_batch_size, course.recompute)
        if key not in self._turns:
            work = evaluate.work(candidate)
            block = block_seconds(work, evaluate.profile, evaluate.device, FITTED)
            head = head_seconds(work, evaluate.device, FITTED)
            self._turns[key] = _Turn(
                block.forward,
                block.backward + block.recomputed,
                head.forward,
                head.backward + head.recomputed,
                self._block_traffic(work),
            )
        return self._turns[key]

    def _block_traffic(self, work: Work) -> float:
        """Seconds of one block's and one micro-batch's exposed traffic; 0 where a rate is not known."""
        profile, device = self.evaluate.profile, self.evaluate.device
        once = replace(work, parallel=replace(work.parallel, micro_batches=1))
        exposed = 0.0
        for transfers, share in (
            (tensor_transfers(once, profile, 1, 0), 1 - FITTED.tensor_hidden if profile.overlaps_tensor else 1.0),
            (context_transfers(once, 1), FITTED.context_exposed if profile.overlaps_context else 1.0),
        ):
            for each in transfers:
                seconds = collective_seconds(each.kind, each.whole_bytes, each.calls, each.group, device, FITTED)
                exposed += share * (seconds or 0.0)
        return exposed

    def _fewest_layers(self, pipeline: int, course: Course) -> int:
        """Layers of the pipeline rank that holds the fewest."""
        key = (pipeline, course.virtual_stages, course.schedule, course.micro_batch_size)
        if key not in self._fewest:
            layers = [end - start for start, end in self.evaluate.cut(pipeline, course)]
            held = (stages_of_rank(rank, pipeline, course.virtual_stages, course.schedule) for rank in range(pipeline))
            self._fewest[key] = min(sum(layers[stage] for stage in numbers) for numbers in held)
        return self._fewest[key]


def _budget(evaluate: Evaluator) -> float:
    """Bytes that a GPU holds beside the reserve, which grows in proportion to them."""
    work, profile = evaluate.work(SIMPLEST), evaluate.profile
    fixed = profile.reserve_bytes(work, 0.0)
    share = (profile.reserve_bytes(work, _LARGE_BYTES) - fixed) / _LARGE_BYTES
    return (evaluate.capacity_bytes - fixed) / (1 + share)
