"""The plans that exist for a model on an inventory: what `search` varies, and what it never touches.

Owns the enumeration. Varied: the four degrees, ZeRO stage and group, offload, schedule with its virtual stages,
micro-batch and recomputation. Never varied: model, precision, global batch, sequence, optimizer, length. Everything
enumerated here passes `validate/` (a property test holds the two together); whether it fits is `search.py`'s question.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Literal

from orchestrator.config.schema import RunConfig, Schedule
from orchestrator.plan.batch import divisors
from orchestrator.plan.inventory import Inventory, take_inventory
from orchestrator.plan.schedules import SPLIT_BACKWARDS
from orchestrator.plan.validate.size_rules import MOST_PIPELINE_RANKS, MOST_STAGES

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
"""In the order of rising time and falling memory."""

_CONTEXT_DEGREES = (1, 2, 4, 8, 16)
_FEWEST_TOKENS = 1024
"""Tokens of a sequence that a context rank holds at least: shorter pieces leave a GPU's matrix products too thin."""
_VIRTUAL_STAGES: dict[Schedule, tuple[int, ...]] = {
    "interleaved_1f1b": (2, 4, 8),
    "interleaved_zero_bubble": (1, 2),
}
"""Stages a rank that are tried; more make the bubble hardly smaller, and messages and kept activations many."""


def recomputations(schedule: Schedule) -> tuple[Recompute, ...]:
    """Kinds of recomputation that a schedule allows: with a split backward pass it saves nothing (`validate/`)."""
    return RECOMPUTE[:1] if schedule in SPLIT_BACKWARDS else RECOMPUTE


Place = tuple[int, int, int, int]
"""Tensor, pipeline, context and data degree: what splits share that differ only in where states are kept."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a model lies on the GPUs: what decides where ranks sit and what they keep."""

    tensor: int
    pipeline: int
    context: int
    data: int
    zero_stage: int
    zero_group: int
    """Ranks of one sharded copy; 1 for stage 0."""
    offload: bool = False

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def place(self) -> Place:
        """The degrees alone."""
        return self.tensor, self.pipeline, self.context, self.data


@dataclass(frozen=True, slots=True)
class Course:
    """How a split works through its batch."""

    schedule: Schedule
    virtual_stages: int
    micro_batch_size: int
    recompute: Recompute

    def with_size(self, micro_batch_size: int) -> Course:
        """The same with another micro-batch."""
        return Course(self.schedule, self.virtual_stages, micro_batch_size, self.recompute)

    def with_recompute(self, recompute: Recompute) -> Course:
        """The same with another recomputation."""
        return Course(self.schedule, self.virtual_stages, self.micro_batch_size, recompute)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan that can be asked for."""

    split: Split
    course: Course


SIMPLEST = Candidate(Split(1, 1, 1, 1, 0, 1), Course("gpipe", 1, 1, "full"))
"""One that every model and cluster has: for what no candidate differs in."""


def tensor_degrees(config: RunConfig, inventory: Inventory) -> tuple[int, ...]:
    """Degrees that divide all that is cut, and whose groups fill every node without a rest."""
    model = config.model
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    cut = gcd(heads, groups or heads, model.intermediate_size)
    nodes = gcd(*(kind.gpus_per_node for kind in inventory.kinds))
    return divisors(gcd(cut, nodes))


def _zero_choices(ranks: int, in_a_node: int) -> Iterator[tuple[int, int]]:
    """(stage, group): no sharding, or each stage over all ranks or over those of one node."""
    yield 0, 1
    if ranks == 1:
        return
    for stage in (1, 2, 3):
        yield stage, ranks
        if 1 < in_a_node < ranks and ranks % in_a_node == 0:
            yield stage, in_a_node


def splits(config: RunConfig) -> Iterator[Split]:
    """Every split that uses as many of the GPUs as its degrees and the batch allow; `cluster.nodes` is a number."""
    inventory = take_inventory(config.cluster)
    sequence, batch = config.training.sequence_length, config.training.global_batch_size
    for tensor in tensor_degrees(config, inventory):
        groups = (inventory.usable(tensor) or 0) // tensor
        for context in _CONTEXT_DEGREES:
            if context > 1 and (sequence % (2 * context) or sequence < context * _FEWEST_TOKENS):
                continue
            if groups % context:
                continue
            for pipeline in divisors(groups // context):
                if pipeline > min(config.model.num_hidden_layers, MOST_PIPELINE_RANKS):
                    break
                most = groups // context // pipeline
                data = max(degree for degree in divisors(batch) if degree <= most)
                yield from _sharded(tensor, pipeline, context, data, inventory.smallest_node)


def _sharded(tensor: int, pipeline: int, context: int, data: int, node: int) -> Iterator[Split]:
    ranks, in_a_node = data * context, max(1, node // tensor)
    for stage, group in _zero_choices(ranks, in_a_node):
        yield Split(tensor, pipeline, context, data, stage, group)
    # Only sharded states can be in host memory. Over one rank the group is that rank.
    yield Split(tensor, pipeline, context, data, 3, ranks, offload=True)


def schedules(config: RunConfig, split: Split, micro_batches: int) -> Iterator[tuple[Schedule, int]]:
    """Schedules, with virtual stages, that take this many micro-batches; fewest moving parts first."""
    pipeline, layers = split.pipeline, config.model.num_hidden_layers
    if pipeline == 1:
        yield "1f1b", 1
        return
    if micro_batches >= pipeline:
        yield "1f1b", 1
    yield "gpipe", 1
    interleaved: tuple[Schedule, ...] = ("interleaved_1f1b", "interleaved_zero_bubble")
    for schedule in interleaved:
        if micro_batches % max(1, micro_batches // pipeline):
            break
        if config.training.compile and schedule != "interleaved_1f1b":
            break
        for virtual in _VIRTUAL_STAGES[schedule]:
            if pipeline * virtual <= min(layers, MOST_STAGES):
                yield schedule, virtual
    if config.training.compile:
        return  # compiled blocks have one backward, which the others would have to take apart
    if 2 * pipeline <= layers:
        yield "zbv_zero_bubble", 2
        if micro_batches >= 2 * pipeline:
            yield "dualpipev", 2


def micro_batch_sizes(config: RunConfig, split: Split) -> tuple[int, ...]:
    """Micro-batches that divide a data rank's share of the batch, ascending."""
    return divisors(config.training.global_batch_size // split.data)


def courses(config: RunConfig, split: Split) -> Iterator[Course]:
    """Every course of a split."""
    for size in micro_batch_sizes(config, split):
        micro_batches = config.training.global_batch_size // split.data // size
        for schedule, virtual in schedules(config, split, micro_batches):
            for recompute in recomputations(schedule):
                yield Course(schedule, virtual, size, recompute)


def candidates(config: RunConfig) -> Iterator[Candidate]:
    """The whole space, one by one."""
    for split in splits(config):
        for course in courses(config, split):
            yield Candidate(split, course)


def asked_for(config: RunConfig, candidate: Candidate) -> RunConfig:
    """The configuration that asks for `candidate` and nothing else; `make_plan` of it is the candidate's plan."""
    split, course = candidate.split, candidate.course
    sequence = config.training.sequence_length
    whole = split.data * split.context
    parallel = config.parallel.model_copy(
        update={
            "strategy": "manual",
            "data": split.data,
            "tensor": split.tensor,
            "pipeline": split.pipeline,
            "context": split.context,
            "zero_stage": split.zero_stage,
            "zero_group": "auto" if split.zero_stage == 0 or split.zero_group == whole else split.zero_group,
            "offload": "all" if split.offload else "none",
            "schedule": course.schedule,
            "virtual_stages": course.virtual_stages,
            "stage_layers": "auto",
            "sequence_parallel": split.tensor > 1 and sequence % (split.context * split.tensor) == 0,
        }
    )
    training = config.training.model_copy(
        update={"micro_batch_size": course.micro_batch_size, "activation_checkpointing": course.recompute}
    )
    return config.model_copy(update={"parallel": parallel, "training": training})


def overrides(config: RunConfig, candidate: Candidate) -> tuple[str, ...]:
    """What to type behind the words that gave `config`, to get the candidate: what differs, and the course."""
    asked, declared = asked_for(config, candidate), config.parallel
    words = [f"parallel.{key}={value}" for key, value in asked.parallel if value != getattr(declared, key)]
    words.append(f"training.micro_batch_size={asked.training.micro_batch_size}")
    words.append(f"training.activation_checkpointing={asked.training.activation_checkpointing}")
    return tuple(word.replace("=True", "=true").replace("=False", "=false") for word in words)
