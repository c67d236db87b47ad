"""Seconds of one optimizer step by cause, from computation, traffic, overlap and the pipeline's bubble.

Owns how the parts add up: each time is exposed time and all add up to the step. A rate that the hardware does not state
makes the step None. The parts are `compute.py`, `traffic.py`, `collectives.py` and `timeline.py`; what a run costs
in days and money is `cost.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log2

from orchestrator.plan.collectives import Group, bus_rate, collective_seconds
from orchestrator.plan.compute import Seconds, block_seconds, head_seconds, memory_bound_seconds
from orchestrator.plan.constants import (
    COLLECTIVE_LATENCY_SECONDS,
    FITTED,
    HOST_LINK_SHARE,
    HOST_MEMORY_RATE,
    Fitted,
)
from orchestrator.plan.device import Device
from orchestrator.plan.schedules import Shape
from orchestrator.plan.states import StageElements, Stages, held_parts, held_stages, rank_elements
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.timeline import ActionSeconds, pipeline_timeline, shape_of
from orchestrator.plan.traffic import (
    Transfer,
    boundary_bytes,
    context_transfers,
    data_transfers,
    host_transfer,
    loss_transfers,
    tensor_transfers,
)
from orchestrator.plan.work import Work


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Exposed seconds of one optimizer step, by cause."""

    compute: float
    tensor: float
    pipeline: float
    bubble: float
    context: float
    data: float
    optimizer: float
    offload: float
    overlapped: float
    """Communication hidden behind computation; not part of the sum."""

    @property
    def step(self) -> float:
        """The whole step."""
        sent = self.tensor + self.pipeline + self.context + self.data + self.offload
        return self.compute + self.bubble + sent + self.optimizer

    @property
    def bubble_fraction(self) -> float:
        """Share of the pipeline's time that a rank waits; (p - 1) / (m + p - 1) for equal stages under 1F1B."""
        busy = self.compute + self.tensor + self.context
        return self.bubble / (busy + self.bubble)


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What one pipeline rank holds and computes; ranks that hold alike stages share one."""

    layers: int
    embedding: bool
    head: bool
    elements: StageElements

    def units(self, tied: bool) -> int:
        """Groups of weights that are gathered and reduced together: blocks, embedding and head; tied ends are one."""
        ends = int(self.embedding) + int(self.head)
        return self.layers + (1 if ends == 2 and tied else ends)


def loads(work: Work) -> tuple[Load, ...]:
    """The load of every pipeline rank."""
    ranks = held_stages(work.parallel)
    unlike = {stages: _load(work, stages) for stages in dict.fromkeys(ranks)}
    return tuple(unlike[stages] for stages in ranks)


def _load(work: Work, stages: Stages) -> Load:
    layers, embedding, head = held_parts(stages)
    elements = rank_elements(work.architecture, stages, work.parallel.tensor, work.parallel.zero_group)
    return Load(layers, embedding, head, elements)


@lru_cache(maxsize=16384)
def bubble_turns(shape: Shape, backward_ratio: float) -> float:
    """Idle time of a pipeline rank, in units of what it computes for one micro-batch, from the schedule's action list.

    Stages are taken as equal; what the busiest has more than the others is in `compute`. `backward_ratio` is the time
    of a backward relative to a forward; half of it is for the weights.
    """
    if shape.pipeline == 1:
        return 0.0
    stages, half = shape.pipeline * shape.virtual_stages, backward_ratio / 2.0
    seconds = ActionSeconds((1.0,) * stages, (half,) * stages, (half,) * stages)
    timeline = pipeline_timeline(shape, seconds)
    return timeline.bubble_fraction * timeline.seconds / (shape.virtual_stages * (1.0 + backward_ratio))


def step_seconds(work: Work, profile: SystemProfile, device: Device, fitted: Fitted = FITTED) -> StepSeconds | None:
    """The step of a plan on a device; None when the device lacks a rate that it needs."""
    passes = pass_seconds(work, profile, device, fitted)
    return None if passes is None else with_states(passes, work, profile, device, fitted)


@dataclass(frozen=True, slots=True)
class PassSeconds:
    """Exposed seconds of a step's forward and backward passes: what does not depend on where the states are kept."""

    compute: float
    tensor: float
    pipeline: float
    bubble: float
    context: float
    overlapped: float
    late: float
    """What waiting for the slowest of all nodes multiplies each time by."""
    busiest: Stages
    """Stages of the pipeline rank that computes longest."""
    turn: Seconds
    """Its computation of one micro-batch."""

    @property
    def total(self) -> float:
        """All of them: a step's least."""
        return self.compute + self.bubble + self.tensor + self.pipeline + self.context


def pass_seconds(work: Work, profile: SystemProfile, device: Device, fitted: Fitted) -> PassSeconds | None:
    """The passes of a plan's step; None when the device lacks a rate that they need."""
    if device.peak_flops is None or device.memory_rate is None or device.attention_flops is None:
        return None
    facts, count = work.parallel, work.parallel.micro_batches
    block, head = block_seconds(work, profile, device, fitted), head_seconds(work, device, fitted)
    ranks = held_stages(facts)
    # Ranks that hold alike stages compute alike.
    turns = {stages: _turn(stages, block, head) for stages in dict.fromkeys(ranks)}
    busiest, turn = max(turns.items(), key=lambda item: item[1].total)
    mean = sum(turns[stages].total for stages in ranks) / len(ranks)

    layers, embedding, holds_head = held_parts(busiest)
    of_loss = loss_transfers(work, profile) if holds_head else ()
    ends = int(embedding) + int(holds_head)
    tensor = _collectives((*tensor_transfers(work, profile, layers, ends), *of_loss), device, fitted)
    context = _collectives(context_transfers(work, layers), device, fitted)
    boundary = _boundary_seconds(work, profile, device, fitted)
    if tensor is None or context is None or boundary is None:
        return None
    tensor_exposed = tensor * (1.0 - fitted.tensor_hidden) if profile.overlaps_tensor else tensor
    context_exposed = context * fitted.context_exposed if profile.overlaps_context else context
    ratio = round(2 * (turn.backward + turn.recomputed) / turn.forward) / 2 if turn.forward else 2.0
    idle = bubble_turns(shape_of(facts), ratio)
    pipeline = boundary * fitted.pipeline_exposed
    # Stragglers delay whatever waits for other nodes, which is the whole step.
    nodes = -(-facts.world_size // device.gpus_per_node)
    late = 1.0 + fitted.jitter * log2(nodes)
    return PassSeconds(
        compute=turn.total * count * late,
        tensor=tensor_exposed * late,
        pipeline=pipeline * late,
        bubble=idle * (mean + (tensor_exposed + context_exposed) / count) * late,
        context=context_exposed * late,
        overlapped=tensor - tensor_exposed + context - context_exposed + boundary - pipeline,
        late=late,
        busiest=busiest,
        turn=turn,
    )


def with_states(
    passes: PassSeconds, work: Work, profile: SystemProfile, device: Device, fitted: Fitted
) -> StepSeconds | None:
    """The passes with moving, reducing and updating the states; None when the device lacks a rate for that."""
    load = _load(work, passes.busiest)
    data = _data_seconds(work, profile, device, fitted, load, passes.turn)
    offload = _offload_seconds(work, profile, device, load.elements, passes.turn)
    if data is None or offload is None or device.memory_rate is None:
        return None
    return StepSeconds(
        compute=passes.compute,
        tensor=passes.tensor,
        pipeline=passes.pipeline,
        bubble=passes.bubble,
        context=passes.context,
        data=data[0] * passes.late,
        optimizer=_optimizer_seconds(work, profile, device.memory_rate, load.elements, fitted),
        offload=offload[0],
        overlapped=passes.overlapped + data[1] + offload[1],
    )


def _turn(stages: Stages, block: Seconds, head: Seconds) -> Seconds:
    """Computation of one micro-batch on a pipeline rank."""
    layers, _, holds_head = held_parts(stages)
    heads = 1 if holds_head else 0
    return Seconds(
        forward=layers * block.forward + heads * head.forward,
        backward=layers * block.backward + heads * head.backward,
        recomputed=layers * block.recomputed + heads * head.recomputed,
    )


def _collectives(transfers: tuple[Transfer, ...], device: Device, fitted: Fitted) -> float | None:
    total = 0.0
    for each in transfers:
        seconds = collective_seconds(each.kind, each.whole_bytes, each.calls, each.group, device, fitted)
        if seconds is None:
            return None
        total += seconds
    return total


def _data_seconds(
    work: Work, profile: SystemProfile, device: Device, fitted: Fitted, load: Load, turn: Seconds
) -> tuple[float, float] | None:
    """(exposed, hidden) seconds of gathering weights and reducing gradients.

    What runs beside computation is exposed where it takes longer, and by a share everywhere, because both use memory
    and the same multiprocessors.
    """
    transfers = data_transfers(work, profile, load.elements, load.units(work.architecture.tied))
    after = _collectives(transfers.after, device, fitted)
    if after is None:
        return None
    exposed, hidden, count = after, 0.0, work.parallel.micro_batches
    for part, available in (
        (transfers.forward, turn.forward * count),
        (transfers.backward, (turn.backward + turn.recomputed) * count),
    ):
        seconds = _collectives(part, device, fitted)
        if seconds is None:
            return None
        covered = min(seconds, available)
        exposed += seconds - covered + fitted.data_exposed * covered
        hidden += (1.0 - fitted.data_exposed) * covered
    return exposed, hidden


def _boundary_seconds(work: Work, profile: SystemProfile, device: Device, fitted: Fitted) -> float | None:
    """Sends of a middle pipeline rank in a step: one forward and one backward a virtual stage and micro-batch."""
    facts = work.parallel
    if facts.pipeline == 1:
        return 0.0
    rate = bus_rate(Group(2, facts.data * facts.context * facts.tensor), device, fitted)
    if rate is None:
        return None
    sends = 2.0 * facts.virtual_stages * facts.micro_batches
    return sends * (boundary_bytes(work, profile) / rate + COLLECTIVE_LATENCY_SECONDS)


def _offload_seconds(
    work: Work, profile: SystemProfile, device: Device, elements: StageElements, turn: Seconds
) -> tuple[float, float] | None:
    """(exposed, hidden) seconds of moving states between host and GPU; copies run beside computation."""
    if not work.offload:
        return 0.0, 0.0
    if device.host_rate is None:
        return None
    moved = host_transfer(work, profile, elements).input_bytes / (device.host_rate * HOST_LINK_SHARE)
    covered = min(moved, turn.total * work.parallel.micro_batches)
    return moved - covered, covered


def _optimizer_seconds(
    work: Work, profile: SystemProfile, memory_rate: float, elements: StageElements, fitted: Fitted
) -> float:
    """Adam over what the rank updates: every state is read and written once, in GPU memory or in the host's."""
    state = profile.bytes_of(work.precision)
    kept = state.weights + state.master + state.gradients + state.moments * work.moments_share
    updated = elements.shared if work.parallel.zero_stage else elements.whole
    rate = HOST_MEMORY_RATE / min(work.gpus_on_host, work.parallel.world_size) if work.offload else memory_rate
    return fitted.step_overhead_seconds + memory_bound_seconds(2.0 * kept * updated, rate)
