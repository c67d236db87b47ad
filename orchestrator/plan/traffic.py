"""What one GPU sends in a step: payloads, calls and groups of every kind of communication.

`Transfer.whole_bytes` is the whole payload of a collective, from which its time follows; `input_bytes` is what a rank
hands in, which is what `plan.traffic` reports: all of it, by axis, is `rank_traffic.py`'s. Times and overlap are
`step_seconds.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from orchestrator.plan.collectives import Group, Kind
from orchestrator.plan.constants import BUCKET_BYTES
from orchestrator.plan.loss_chunks import chunk_of, gradient_ahead
from orchestrator.plan.stages import stages_of_rank
from orchestrator.plan.states import StageElements
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.work import Work

_REPEATED = {"layers": 0.5, "full": 1.0}
"""Share of the blocks whose forward collectives are repeated in the backward pass, by what is recomputed."""
_GATHERED_AGAIN = {**_REPEATED, "cheap": 1.0}
"""The same for the gathers in front of products; what follows these is kept when only cheap operations are repeated."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Calls of one collective within a step."""

    kind: Kind
    whole_bytes: float
    """Whole payload of all calls."""
    calls: float
    group: Group

    @property
    def input_bytes(self) -> float:
        """What the rank hands in: its shard of a gather, everything otherwise."""
        return self.whole_bytes / self.group.ranks if self.kind == "all_gather" else self.whole_bytes


@dataclass(frozen=True, slots=True)
class DataTransfers:
    """Traffic of data parallelism and ZeRO in one step, by the phase whose computation can hide it."""

    forward: tuple[Transfer, ...]
    backward: tuple[Transfer, ...]
    after: tuple[Transfer, ...]
    """After the last backward pass, hidden by nothing."""

    @property
    def all(self) -> tuple[Transfer, ...]:
        """Every transfer."""
        return (*self.forward, *self.backward, *self.after)


def stream_bytes(work: Work) -> float:
    """The residual stream of one micro-batch, whole."""
    return float(work.tokens) * work.architecture.hidden * work.activation_bytes


def data_transfers(work: Work, profile: SystemProfile, elements: StageElements, units: int) -> DataTransfers:
    """Gathers and reductions of the weights and gradients that a rank holds in `units` that are moved together."""
    facts = work.parallel
    whole = Group(facts.data * facts.context, facts.tensor)
    if whole.ranks == 1:
        return DataTransfers((), (), ())
    reduced = elements.whole * profile.reduced_bytes(work.precision)
    forward, backward = (
        ((), (Transfer("all_reduce", reduced, _buckets(work, profile, elements, units), whole),))
        if facts.zero_stage == 0
        else _shared_transfers(work, profile, elements, float(units), reduced)
    )
    if profile.overlaps_data:
        return DataTransfers(forward, backward, ())
    return DataTransfers((), (), (*forward, *backward))


def _buckets(work: Work, profile: SystemProfile, elements: StageElements, units: int) -> float:
    """All-reduces of replicated gradients: units are joined until a bucket is full; on a CPU all are one."""
    if profile.one_unit_on_cpu and not work.on_gpu:
        return 1.0
    unit_bytes = 4.0 * max(elements.block, 1)
    joined = max(1, ceil(BUCKET_BYTES / unit_bytes))
    return float(ceil(units / joined))


def _shared_transfers(
    work: Work, profile: SystemProfile, elements: StageElements, units: float, reduced: float
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """(forward, backward) transfers of ZeRO stages 1 to 3.

    Stage 3 gathers every unit for each forward and each backward pass, stages 1 and 2 once a step; gradients are
    reduced once a step, or after each micro-batch where the system keeps them shared between micro-batches.
    """
    facts = work.parallel
    state, shard = profile.bytes_of(work.precision), Group(facts.zero_group, facts.tensor, profile.one_network_card)
    times = facts.micro_batches
    stage = profile.zero_stage(work)
    reductions = times if stage >= 2 and profile.reduces_each_micro_batch else 1
    backward: list[Transfer] = [Transfer("reduce_scatter", reduced * reductions, units * reductions, shard)]
    if facts.replicate > 1:
        replicas = Group(facts.replicate, facts.tensor * facts.zero_group)
        backward.append(Transfer("all_reduce", reduced / facts.zero_group, units, replicas))
    gathered = elements.whole * (state.gathered or state.weights)
    if stage < 3:
        return (Transfer("all_gather", gathered, units, shard),), tuple(backward)
    each = Transfer("all_gather", gathered * times, units * times, shard)
    return (each,), (each, *backward)


def tensor_transfers(work: Work, profile: SystemProfile, layers: int, ends: int) -> tuple[Transfer, ...]:
    """Collectives of tensor parallelism: two pairs a block forward and backward, again for recomputed blocks, one at
    each end. A pair is an all-reduce, or with sequence parallelism a gather and a reduce-scatter."""
    tensor = work.parallel.tensor
    if tensor == 1:
        return ()
    # A recomputation that stops early leaves out a block's last product and its sum.
    sums = (1.0 if profile.stops_recomputing_early else 2.0) * _REPEATED.get(work.recompute, 0.0)
    gathers = 2.0 * _GATHERED_AGAIN.get(work.recompute, 0.0)
    stream, group = stream_bytes(work), Group(tensor, 1)
    summed, gathered = ((layers * (4.0 + again) + ends) * work.parallel.micro_batches for again in (sums, gathers))
    if work.sequence_parallel:
        return (
            Transfer("all_gather", gathered * stream, gathered, group),
            Transfer("reduce_scatter", summed * stream, summed, group),
        )
    return (Transfer("all_reduce", summed * stream, summed, group),)


def loss_transfers(work: Work, profile: SystemProfile) -> tuple[Transfer, ...]:
    """Two FP32 numbers a token, of every tensor rank's part of the vocabulary, gathered chunk by chunk on the rank with
    the head; once more where the backward pass computes the logits again."""
    tensor, facts = work.parallel.tensor, work.parallel
    if tensor == 1 or not profile.loss_in_chunks:
        return ()
    chunk = chunk_of(work.tokens, work.architecture.hidden, work.activation_bytes)
    passes = facts.micro_batches * (1 if gradient_ahead(facts.schedule, facts.pipeline) else 2)
    calls = float(passes * ceil(work.tokens / chunk))
    return (Transfer("all_gather", 8.0 * tensor * work.tokens * passes, calls, Group(tensor, 1)),)


def context_transfers(work: Work, layers: int) -> tuple[Transfer, ...]:
    """Keys and values of the whole sequence gathered in each block, their gradients scattered back."""
    context, tensor = work.parallel.context, work.parallel.tensor
    if context == 1:
        return ()
    model = work.architecture
    width = 2.0 * model.key_value_heads * model.head_dim / tensor
    repeated = _REPEATED.get(work.recompute, 0.0)
    calls = float(layers * work.parallel.micro_batches)
    payload = work.tokens * context * width * work.activation_bytes * calls
    group = Group(context, tensor)
    return (
        Transfer("all_gather", payload * (1.0 + repeated), calls * (1.0 + repeated), group),
        Transfer("reduce_scatter", payload, calls, group),
    )


def boundary_bytes(work: Work, profile: SystemProfile) -> float:
    """What a stage sends to the next for one micro-batch."""
    split = work.sequence_parallel or profile.scatters_boundary
    return stream_bytes(work) / (work.parallel.tensor if split else 1)


def boundary_sends(work: Work, pipeline_rank: int) -> int:
    """Sends of a pipeline rank in a step: outputs to the next stage, gradients to the one before, where those are on
    another rank."""
    facts = work.parallel
    last, sends = facts.pipeline * facts.virtual_stages - 1, 0
    own = stages_of_rank(pipeline_rank, facts.pipeline, facts.virtual_stages, facts.schedule)
    for stage in own:
        sends += int(stage < last and stage + 1 not in own) + int(stage > 0 and stage - 1 not in own)
    return sends * facts.micro_batches


def host_transfer(work: Work, profile: SystemProfile, elements: StageElements) -> Transfer:
    """States in host memory: the rank's share of the weights is fetched and its gradients are returned as often as the
    ZeRO stage gathers and reduces: stage 3 fetches for each forward and each backward pass."""
    state, stage, count = profile.bytes_of(work.precision), profile.zero_stage(work), work.parallel.micro_batches
    fetches = 2 * count if stage == 3 else 1
    returns = count if stage >= 2 else 1
    moved = elements.shared * (fetches * (state.master or state.weights) + returns * state.gradients)
    return Transfer("reduce_scatter", moved, float(fetches + returns), Group(1, 1))
