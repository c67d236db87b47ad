"""Bytes and seconds of one candidate of a search, and the least of both that a candidate can need.

Owns the short way from a candidate to the memory and time models: equal to `make_plan` of the candidate's configuration
(a test), without building one. Remembers what candidates share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.config.schema import RunConfig, Schedule
from orchestrator.plan import stages
from orchestrator.plan.activations import BlockActivations, block_activations
from orchestrator.plan.collectives import collective_seconds
from orchestrator.plan.compute import block_seconds, head_seconds
from orchestrator.plan.constants import FITTED
from orchestrator.plan.device import device_of
from orchestrator.plan.fit import gpu_shortage, host_shortage
from orchestrator.plan.inventory import take_inventory, uniform_cluster
from orchestrator.plan.memory import memories_of, rank_states
from orchestrator.plan.profiles import profile_named
from orchestrator.plan.run_plan import ParallelFacts, RankMemory
from orchestrator.plan.search_space import RECOMPUTE, Candidate, Course, Recompute, Split, asked_for
from orchestrator.plan.step_seconds import bubble_turns, step_seconds
from orchestrator.plan.timeline import peak_kept
from orchestrator.plan.traffic import context_transfers, tensor_transfers
from orchestrator.plan.work import Work, work_of

TIGHT = 0.98
"""Share of a card above which a plan that fits may not: the planner's tensors are right to a few hundredths."""
_LARGE_BYTES = 2.0**40
"""The reserve grows in proportion to what is used; its slope is read over a distance that floats resolve well."""


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


@dataclass(frozen=True, slots=True)
class _States:
    """Bytes of a rank's states at two moments, and what it may need before the reserve is added."""

    at_the_end: float
    """With all gradients, when the last copies have been given back."""
    gathered: float
    """With all copies, without gradients."""
    gradients: float
    budget: float


class Evaluator:
    """Evaluates candidates of one configuration, whose `cluster.nodes` is a number."""

    def __init__(self, config: RunConfig, profile: str = "ours") -> None:
        nodes = sum(kind.nodes or 0 for kind in take_inventory(config.cluster).kinds)
        self.declared = config
        self.config = config.model_copy(update={"cluster": uniform_cluster(config.cluster, nodes)})
        self.profile = profile_named(profile)
        self.device = device_of(self.config.cluster, config.training.precision)
        self.capacity_bytes = int(self.config.cluster.gpu.memory_gib * 2**30)
        self._cuts: dict[tuple[int, int, bool, int], tuple[tuple[int, int], ...]] = {}
        self._works: dict[str, Work] = {}
        self._last: tuple[Candidate, Work] | None = None
        self._fewest: dict[tuple[int, int, bool, int], int] = {}
        self._states: dict[tuple[Split, int, bool], _States] = {}
        self._blocks: dict[tuple[int, int, int, str], BlockActivations] = {}
        self._turns: dict[tuple[int, int, int, str], _Turn] = {}

    def micro_batches(self, split: Split, micro_batch_size: int) -> int:
        """Micro-batches of a step and data rank."""
        return self.config.training.global_batch_size // split.data // micro_batch_size

    def facts(self, candidate: Candidate) -> ParallelFacts:
        """The candidate's degrees, as `make_plan` decides them."""
        split, course = candidate.split, candidate.course
        return ParallelFacts(
            data=split.data,
            tensor=split.tensor,
            pipeline=split.pipeline,
            context=split.context,
            zero_stage=split.zero_stage,
            zero_group=split.zero_group,
            replicate=split.data * split.context // split.zero_group,
            world_size=split.world_size,
            schedule=course.schedule,
            virtual_stages=course.virtual_stages,
            micro_batches=self.micro_batches(split, course.micro_batch_size),
            stage_layers=self._cut(split.pipeline, course),
        )

    def _cut(self, pipeline: int, course: Course) -> tuple[tuple[int, int], ...]:
        v_shaped = course.schedule in stages.V_SHAPED
        key = (pipeline, course.virtual_stages, v_shaped, course.micro_batch_size)
        if key not in self._cuts:
            model, sequence = self.config.model, self.config.training.sequence_length
            costs = stages.stage_costs(model, sequence, course.micro_batch_size)
            counts = stages.balanced_counts(
                model.num_hidden_layers, pipeline, course.virtual_stages, course.schedule, costs
            )
            if counts is None:
                raise AssertionError("the space holds no pipeline with more stages than layers")
            self._cuts[key] = stages.as_ranges(counts)
        return self._cuts[key]

    def work(self, candidate: Candidate) -> Work:
        """What one GPU of the candidate has to do. The last one is remembered: bytes follow seconds."""
        if self._last is None or self._last[0] is not candidate:
            self._last = (candidate, self._work(candidate))
        return self._last[1]

    def _work(self, candidate: Candidate) -> Work:
        split, course = candidate.split, candidate.course
        facts = self.facts(candidate)
        like = self._works.get(course.recompute)
        if like is None:
            like = self._works[course.recompute] = work_of(asked_for(self.config, candidate), facts)
        sequence = self.config.training.sequence_length
        return replace(
            like,
            parallel=facts,
            micro_batch_size=course.micro_batch_size,
            sequence_parallel=split.tensor > 1 and sequence % (split.context * split.tensor) == 0,
            offload=split.offload,
        )

    def memories(self, candidate: Candidate) -> tuple[RankMemory, ...]:
        """Memory of every pipeline rank."""
        return memories_of(self.work(candidate), self.profile)

    def shortage(self, candidate: Candidate) -> tuple[float, str] | None:
        """(by how much, why) the candidate does not fit; None when it does. The measure is need / capacity."""
        memories = self.memories(candidate)
        return gpu_shortage(memories, self.capacity_bytes) or host_shortage(memories, self.config.cluster)

    def tight(self, candidate: Candidate) -> bool:
        """Whether the fullest GPU is so full that the figures' own error decides (see `TIGHT`)."""
        return max(memory.total_bytes or 0 for memory in self.memories(candidate)) > TIGHT * self.capacity_bytes

    def leanest_shortage(self, split: Split, schedule: Schedule, virtual_stages: int) -> tuple[float, str] | None:
        """The shortage with the smallest micro-batch and full recomputation."""
        return self.shortage(Candidate(split, Course(schedule, virtual_stages, 1, "full")))

    def states_bytes(self) -> float:
        """States of the whole model that are kept between steps, each once."""
        work = self.work(Candidate(Split(1, 1, 1, 1, 0, 1), Course("gpipe", 1, 1, "full")))
        states = rank_states(work, self.profile, ((work.architecture.layers, True, True),))
        return float(states.persistent)

    def seconds(self, candidate: Candidate) -> float | None:
        """Time of the candidate's step; None when the hardware's rates are not declared."""
        step = step_seconds(self.work(candidate), self.profile, self.device)
        return None if step is None else step.step

    def least_recompute(self, split: Split, course: Course, level: int) -> int | None:
        """The least recomputation, from `level` on, with which pipeline rank 0 may fit; None: it does with none.

        Counts rank 0 with as few layers as a cut can leave it, and what the schedule keeps there: never too much.
        """
        count = self.micro_batches(split, course.micro_batch_size)
        least = self.config.model.num_hidden_layers // (split.pipeline * course.virtual_stages)
        states = self._rank_0_states(Candidate(split, course), least * course.virtual_stages, count == 1)
        if states.at_the_end > states.budget:
            return None
        kept = peak_kept(
            course.schedule, split.pipeline, course.virtual_stages, count, 0, (1.0,) * course.virtual_stages
        )
        in_flight = [stage.whole + stage.weights_only for stage in kept]
        blocks = least * sum(in_flight)
        # Of several stages some may have no gradients yet.
        sure = course.virtual_stages == 1 and count > max(in_flight)
        before = states.gathered + (states.gradients if sure else 0.0)
        for higher in range(level, len(RECOMPUTE)):
            block = self._block(split, course.micro_batch_size, RECOMPUTE[higher])
            # In the first block's backward, what is kept is still there beside what that block works on.
            if before + blocks * block.kept + block.working <= states.budget:
                return higher
        return None

    def _rank_0_states(self, candidate: Candidate, layers: int, once: bool) -> _States:
        """Rank 0's states with that many layers; `once`: there is one micro-batch."""
        key = (candidate.split, layers, once)
        if key not in self._states:
            work = self.work(candidate)
            states = rank_states(work, self.profile, ((layers, True, False),))
            kept = float(states.parameters + states.optimizer)
            gradients = 0.0 if candidate.split.offload else float(states.gradients)
            fixed = self.profile.reserve_bytes(work, 0.0)
            share = (self.profile.reserve_bytes(work, _LARGE_BYTES) - fixed) / _LARGE_BYTES
            self._states[key] = _States(
                at_the_end=kept + gradients + states.gathered_last,
                gathered=kept + states.gathered,
                gradients=gradients,
                budget=(self.capacity_bytes - fixed) / (1 + share),
            )
        return self._states[key]

    def _block(self, split: Split, micro_batch_size: int, recompute: Recompute) -> BlockActivations:
        """Activations of one block and micro-batch."""
        key = (split.tensor, split.context, micro_batch_size, recompute)
        if key not in self._blocks:
            simple = Course("gpipe", 1, micro_batch_size, recompute)
            self._blocks[key] = block_activations(self.work(Candidate(split, simple)), self.profile)
        return self._blocks[key]

    def _turn(self, candidate: Candidate) -> _Turn:
        """Seconds of one micro-batch in one block and in the head."""
        split, course = candidate.split, candidate.course
        key = (split.tensor, split.context, course.micro_batch_size, course.recompute)
        if key not in self._turns:
            work = self.work(candidate)
            block = block_seconds(work, self.profile, self.device, FITTED)
            head = head_seconds(work, self.device, FITTED)
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
        once = replace(work, parallel=replace(work.parallel, micro_batches=1))
        exposed = 0.0
        for transfers, share in (
            (
                tensor_transfers(once, self.profile, 1, 0),
                1 - FITTED.tensor_hidden if self.profile.overlaps_tensor else 1.0,
            ),
            (context_transfers(once, 1), FITTED.context_exposed if self.profile.overlaps_context else 1.0),
        ):
            for each in transfers:
                seconds = collective_seconds(each.kind, each.whole_bytes, each.calls, each.group, self.device, FITTED)
                exposed += share * (seconds or 0.0)
        return exposed

    def floor_seconds(self, candidate: Candidate) -> float:
        """What the step takes at least: computation spread evenly over the pipeline, the traffic of its blocks on the
        rank with the fewest, and the bubble this leaves."""
        if self.device.peak_flops is None or self.device.memory_rate is None or self.device.attention_flops is None:
            return 0.0
        split, course = candidate.split, candidate.course
        turn, layers = self._turn(candidate), self.config.model.num_hidden_layers
        count, idle = self.micro_batches(split, course.micro_batch_size), 0.0
        if split.pipeline > 1:
            idle = min(
                bubble_turns(course.schedule, split.pipeline, course.virtual_stages, count, ratio)
                for ratio in turn.ratios(layers // split.pipeline)
            )
        whole = layers * (turn.forward + turn.backward) + turn.head_forward + turn.head_backward
        traffic = turn.traffic * self._fewest_layers(split.pipeline, course) if turn.traffic else 0.0
        return (whole / split.pipeline + traffic) * (count + idle)

    def _fewest_layers(self, pipeline: int, course: Course) -> int:
        """Layers of the pipeline rank that holds the fewest."""
        key = (pipeline, course.virtual_stages, course.schedule in stages.V_SHAPED, course.micro_batch_size)
        if key not in self._fewest:
            layers = [end - start for start, end in self._cut(pipeline, course)]
            held = (
                stages.stages_of_rank(rank, pipeline, course.virtual_stages, course.schedule)
                for rank in range(pipeline)
            )
            self._fewest[key] = min(sum(layers[stage] for stage in numbers) for numbers in held)
        return self._fewest[key]
