"""Bytes and seconds of one candidate of a search.

Owns the short way from a candidate to the memory and time models: equal to `make_plan` of the candidate's configuration
(a test), without building one. Remembers what candidates share: the passes of those that differ only in where states
are kept, the states of those that differ only in how they work through the batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config.schema import RunConfig, Schedule
from orchestrator.plan import stages
from orchestrator.plan.constants import FITTED
from orchestrator.plan.cost import model_share
from orchestrator.plan.device import device_of
from orchestrator.plan.fit import gpu_shortage, host_shortage, need
from orchestrator.plan.held import Common, Held, common_of, rank_states
from orchestrator.plan.inventory import take_inventory, uniform_cluster
from orchestrator.plan.memory import decisive_memories, memories_of
from orchestrator.plan.profiles import profile_named
from orchestrator.plan.run_plan import ParallelFacts, RankMemory
from orchestrator.plan.schedules import SPLIT_BACKWARDS
from orchestrator.plan.search_space import SIMPLEST, Candidate, Course, Place, Recompute, Split, asked_for
from orchestrator.plan.states import Stages
from orchestrator.plan.step_seconds import PassSeconds, pass_seconds, with_states
from orchestrator.plan.work import Work, work_of

TIGHT = 0.98
"""Share of a card above which a plan that fits may not: the planner's tensors are right to a few hundredths."""


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
        self._works: dict[Recompute, Work] = {}
        self._last: tuple[Candidate, Work] | None = None
        self._passes: dict[tuple[Place, Course], PassSeconds | None] = {}
        self._common: dict[tuple[Place, Course], Common] = {}
        self._held: dict[tuple[Split, bool, bool], dict[Stages, Held]] = {}

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
            stage_layers=self.cut(split.pipeline, course),
        )

    def cut(self, pipeline: int, course: Course) -> tuple[tuple[int, int], ...]:
        """[first, last+1] layer of every virtual stage."""
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
        sequence = like.sequence_length
        return Work(
            architecture=like.architecture,
            parallel=facts,
            sequence_length=sequence,
            micro_batch_size=course.micro_batch_size,
            precision=like.precision,
            recompute=like.recompute,
            sequence_parallel=split.tensor > 1 and sequence % (split.context * split.tensor) == 0,
            offload=split.offload,
            moments_share=like.moments_share,
            attended=like.attended,
            on_gpu=like.on_gpu,
            gpus_on_host=like.gpus_on_host,
        )

    def memories(self, candidate: Candidate) -> tuple[RankMemory, ...]:
        """Memory of every pipeline rank."""
        return memories_of(self.work(candidate), self.profile)

    def _decisive(self, candidate: Candidate) -> Iterator[RankMemory]:
        """Memory of the ranks among which the fullest is; what candidates share is computed once."""
        split, course, work = candidate.split, candidate.course, self.work(candidate)
        place = (split.place, course)
        common = self._common.get(place)
        if common is None:
            common = self._common[place] = common_of(work, self.profile)
        shared_alike = (split, work.parallel.micro_batches == 1, course.schedule in SPLIT_BACKWARDS)
        return decisive_memories(work, self.profile, common, self._held.setdefault(shared_alike, {}))

    def shortage(self, candidate: Candidate) -> tuple[float, str] | None:
        """(by how much, why) the candidate does not fit; None when it does. The measure is need / capacity."""
        memories = tuple(self._decisive(candidate))
        return gpu_shortage(memories, self.capacity_bytes) or host_shortage(memories, self.config.cluster)

    def peak_where_it_fits(self, candidate: Candidate) -> int | None:
        """Bytes of the candidate's fullest GPU; None when it does not fit."""
        memories = []
        for memory in self._decisive(candidate):
            if need(memory) > self.capacity_bytes:
                return None
            memories.append(memory)
        return None if host_shortage(memories, self.config.cluster) else max(map(need, memories))

    def tight(self, peak_bytes: int) -> bool:
        """Whether a GPU is so full that the figures' own error decides (see `TIGHT`)."""
        return peak_bytes > TIGHT * self.capacity_bytes

    def leanest_shortage(self, split: Split, schedule: Schedule, virtual_stages: int) -> tuple[float, str] | None:
        """The shortage with the smallest micro-batch and full recomputation."""
        return self.shortage(Candidate(split, Course(schedule, virtual_stages, 1, "full")))

    def states_bytes(self) -> float:
        """States of the whole model that are kept between steps, each once."""
        work = self.work(SIMPLEST)
        states = rank_states(work, self.profile, ((work.architecture.layers, True, True),))
        return float(states.persistent)

    def passes(self, candidate: Candidate) -> PassSeconds | None:
        """Time of the candidate's forward and backward passes; None when the hardware's rates are not declared."""
        key = (candidate.split.place, candidate.course)
        if key not in self._passes:
            self._passes[key] = pass_seconds(self.work(candidate), self.profile, self.device, FITTED)
        return self._passes[key]

    def seconds(self, candidate: Candidate) -> float | None:
        """Time of the candidate's step; None when the hardware's rates are not declared."""
        passes = self.passes(candidate)
        if passes is None:
            return None
        step = with_states(passes, self.work(candidate), self.profile, self.device, FITTED)
        return None if step is None else step.step

    def mfu(self, candidate: Candidate, step_seconds: float) -> float | None:
        """Model FLOP/s of a step of that length over the peak (0 to 1)."""
        return model_share(self.work(candidate), self.device, step_seconds)
