"""Rules of tensor, context, data and ZeRO: what the degrees must divide and how many GPUs they need."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from orchestrator.errors import Problem
from orchestrator.plan.batch import divisors, nearest, nearest_multiples
from orchestrator.plan.facts import Facts
from orchestrator.plan.layout import nodes_needed
from orchestrator.plan.validate.size_rules import LARGEST_WORLD
from orchestrator.plan.validate.wording import one_of


def _tensor_degrees(facts: Facts) -> list[int]:
    """Tensor degrees that divide everything that is cut and fit into a node."""
    model = facts.config.model
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    cut = gcd(heads, groups or heads, model.intermediate_size)
    return [degree for degree in divisors(cut) if degree <= facts.inventory.largest_node]


def _tensor_divides(facts: Facts, count: int, key: str, what: str, why: str = "") -> Iterator[Problem]:
    tensor = facts.config.parallel.tensor
    if count % tensor == 0:
        return
    yield Problem(
        "parallel.tensor",
        f"{tensor} does not divide {key}={count}: {what}.{why}",
        f"Use parallel.tensor={one_of(_tensor_degrees(facts))}.",
    )


def tensor_divides_heads(facts: Facts) -> Iterator[Problem]:
    """Query heads are dealt out whole."""
    model = facts.config.model
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    also = groups is not None and groups % facts.config.parallel.tensor != 0
    why = f" Nor does it divide model.num_key_value_heads={groups}." if also else ""
    yield from _tensor_divides(facts, heads, "model.num_attention_heads", "each rank computes whole heads", why)


def tensor_divides_key_value_heads(facts: Facts) -> Iterator[Problem]:
    """Key and value heads are dealt out whole; they are not replicated."""
    model = facts.config.model
    groups = model.num_key_value_heads
    if groups is None or model.num_attention_heads % facts.config.parallel.tensor:
        return
    why = " Key/value heads are not replicated over tensor ranks." if groups < facts.config.parallel.tensor else ""
    yield from _tensor_divides(
        facts, groups, "model.num_key_value_heads", "each rank computes whole key/value heads", why
    )


def tensor_divides_feed_forward(facts: Facts) -> Iterator[Problem]:
    """The feed-forward layer is cut by columns, then by rows."""
    width = facts.config.model.intermediate_size
    yield from _tensor_divides(
        facts, width, "model.intermediate_size", "the feed-forward layer is cut into equal parts"
    )


def tensor_fits_a_node(facts: Facts) -> Iterator[Problem]:
    """A tensor group talks several times in every layer and never leaves its node."""
    tensor, largest = facts.config.parallel.tensor, facts.inventory.largest_node
    if tensor <= largest:
        return
    yield Problem(
        "parallel.tensor",
        f"A tensor-parallel group of {tensor} does not fit into a node of {largest} GPUs; it never crosses nodes.",
        f"Use parallel.tensor={one_of(_tensor_degrees(facts))} and split the rest with parallel.pipeline or data.",
    )


def context_divides_sequence(facts: Facts) -> Iterator[Problem]:
    """Context ranks take one early and one late piece each, so that causal attention is balanced: 2 x context
    pieces."""
    parallel, sequence = facts.config.parallel, facts.config.training.sequence_length
    pieces = 2 * parallel.context if parallel.context > 1 else 1
    if sequence % pieces:
        yield Problem(
            "parallel.context",
            f"training.sequence_length={sequence} is not divisible by 2 x parallel.context = "
            f"{pieces}; each context rank "
            "takes an early and a late piece of the sequence.",
            f"Use training.sequence_length={one_of(nearest_multiples(sequence, pieces))}, or another parallel.context.",
        )


def sequence_parallel_divides_sequence(facts: Facts) -> Iterator[Problem]:
    """With sequence parallelism, tensor ranks hold equal parts of the context rank's sequence."""
    parallel, sequence = facts.config.parallel, facts.config.training.sequence_length
    if not parallel.sequence_parallel or sequence % (2 * parallel.context if parallel.context > 1 else 1):
        return
    unit = parallel.context * parallel.tensor
    if sequence % unit:
        yield Problem(
            "parallel.sequence_parallel",
            f"training.sequence_length={sequence} is not divisible by context x tensor = {parallel.context} x "
            f"{parallel.tensor} = {unit}.",
            f"Use training.sequence_length={one_of(nearest_multiples(sequence, unit))}, or "
            "parallel.sequence_parallel=false.",
        )


def _product(facts: Facts, data: int | None) -> str:
    parallel = facts.config.parallel
    factors = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "context": parallel.context, "data": data}
    named = [f"{name} {size}" for name, size in factors.items() if size is not None and (size > 1 or name == "data")]
    return " x ".join(named) if named else "1"


def degrees_fit_the_gpus(facts: Facts) -> Iterator[Problem]:
    """The product of the degrees is at most the GPUs there are."""
    parallel, inventory = facts.config.parallel, facts.inventory
    if facts.gpus is None:
        return
    needed = facts.fixed * (facts.data or 1)
    if needed <= facts.gpus:
        return
    shown = _product(facts, facts.data or 1)
    size = inventory.smallest_node
    if facts.config.cluster.node_groups:
        key, fixes = "cluster.node_groups", [f"Declare more nodes of at least {parallel.tensor} GPUs"]
    elif facts.config.cluster.device == "cpu" and inventory.gpus == size:
        key, fixes = "cluster.gpus_per_node", [f"Use cluster.gpus_per_node={needed}, as many processes on one machine"]
    else:
        nodes = nodes_needed(needed, parallel.tensor, size)
        key, fixes = "cluster.nodes", [f"Use cluster.nodes={nodes} ({nodes} x {size} = {nodes * size} GPUs)"]
    if facts.fixed <= facts.gpus:
        fixes.append(f"parallel.data={facts.gpus // facts.fixed} on the GPUs there are")
    idle = inventory.gpus != facts.gpus
    usable = f", {facts.gpus} of them in whole tensor groups of {parallel.tensor}" if idle else ""
    yield Problem(
        key,
        f"The plan needs {needed} GPUs ({shown} = {needed}), but the cluster has {inventory.describe()}{usable}.",
        ", or ".join(fixes) + ".",
    )


def auto_data_comes_out_whole(facts: Facts) -> Iterator[Problem]:
    """`data=auto` takes all GPUs that the other degrees leave; a remainder is not dropped silently."""
    parallel = facts.config.parallel
    if parallel.data != "auto" or facts.gpus is None or facts.fixed > facts.gpus or facts.gpus % facts.fixed == 0:
        return
    copies = facts.gpus // facts.fixed
    yield Problem(
        "parallel.data",
        f"auto takes all {facts.gpus} GPUs, but tensor x pipeline x context = {parallel.tensor} x "
        f"{parallel.pipeline} x "
        f"{parallel.context} = {facts.fixed} does not divide them.",
        f"Use parallel.data={copies} to leave {facts.gpus - copies * facts.fixed} GPUs idle, or degrees whose product "
        f"divides {facts.gpus}.",
    )


def world_is_listable(facts: Facts) -> Iterator[Problem]:
    """A world beyond any real cluster is a slip."""
    if facts.world_size is not None and facts.world_size > LARGEST_WORLD:
        yield Problem(
            "parallel.data",
            f"The degrees make {facts.world_size:,} ranks ({_product(facts, facts.data)}); at most "
            f"{LARGEST_WORLD:,} are "
            "planned for.",
            "Check the degrees for a slip.",
        )


def zero_group_divides_ranks(facts: Facts) -> Iterator[Problem]:
    """Sharded copies are whole: the ranks that hold the same part of the model fall into equal groups."""
    parallel, ranks = facts.config.parallel, facts.zero_ranks
    if parallel.zero_group == "auto":
        return
    if parallel.zero_stage == 0:
        yield Problem(
            "parallel.zero_group",
            f"zero_group={parallel.zero_group} has nothing to shard: parallel.zero_stage=0 keeps full copies.",
            "Use parallel.zero_group=auto, or parallel.zero_stage=1, 2 or 3.",
        )
    elif ranks is not None and ranks % parallel.zero_group:
        yield Problem(
            "parallel.zero_group",
            f"{parallel.zero_group} does not divide data x context = {facts.data} x {parallel.context} = {ranks}.",
            f"Use {one_of(nearest(parallel.zero_group, divisors(ranks)))}, or auto for {ranks}.",
        )


RULES = (
    tensor_divides_heads,
    tensor_divides_key_value_heads,
    tensor_divides_feed_forward,
    tensor_fits_a_node,
    context_divides_sequence,
    sequence_parallel_divides_sequence,
    degrees_fit_the_gpus,
    auto_data_comes_out_whole,
    world_is_listable,
    zero_group_divides_ranks,
)
