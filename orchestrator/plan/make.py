"""`make_plan`: a configuration becomes a decided plan, with everything wrong with it said at once.

Owns the order in which the parts of a plan are computed. Never raises for a user's mistake and never gives a number it
does not have: what cannot be computed is None, with a warning. The parts are `facts.py` (counting), `validate/`
(rules), `memory.py` (bytes), `cost.py` (seconds), `layout.py` (ranks); `search.py` calls this module's parts for many
plans.
"""

from __future__ import annotations

from dataclasses import replace

from models.spec import flops_per_token, parameter_count
from orchestrator.config.schema import RunConfig
from orchestrator.errors import Problem
from orchestrator.plan import batch
from orchestrator.plan.auto import resolve
from orchestrator.plan.cost import cost_plan, step_time
from orchestrator.plan.facts import Facts, derive
from orchestrator.plan.fit import fit_problems, gpu_shortage, host_shortage
from orchestrator.plan.inventory import uniform_cluster
from orchestrator.plan.layout import place_ranks
from orchestrator.plan.memory import checkpoint_bytes, rank_memories
from orchestrator.plan.profiles import profile_named
from orchestrator.plan.remedy import fitting_changes
from orchestrator.plan.run_plan import MemoryPlan, ModelFacts, ParallelFacts, RunPlan
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.validate import rules, size_rules

_GIB = 2**30


def make_plan(config: RunConfig, *, profile: str = "ours") -> RunPlan:
    """Decide everything about a run that arithmetic can decide.

    `profile` names the system whose bytes and overlaps are computed; the product is `ours`. The plan's `config` is the
    configuration with every `auto` that a search resolved replaced by its value; planning it again gives the same plan.

    Raises:
        KeyError: no such profile.
    """
    problems = tuple(size_rules.absurd_sizes(config))
    if problems:
        return RunPlan(config, None, None, None, problems=problems, warnings=(_NOT_COMPUTED,), profile=profile)
    resolved = resolve(config, lambda tried: make_plan(tried, profile=profile).problems)
    config = resolved.config
    facts = derive(config)
    problems = resolved.problems or rules.check(facts)
    model = _model_facts(config, problems)
    parallel = None if problems else parallel_facts(facts)
    plan = RunPlan(
        config=config,
        model=model,
        parallel=parallel,
        memory=None,
        problems=problems,
        warnings=(*resolved.notes, *rules.warn(facts)),
        profile=profile,
    )
    if parallel is None:
        return replace(plan, warnings=(*plan.warnings, _NOT_COMPUTED))
    return _priced(plan, facts, parallel)


_NOT_COMPUTED = "Layout, memory, time and cost are not computed while the problems stand."


def _model_facts(config: RunConfig, problems: tuple[Problem, ...]) -> ModelFacts | None:
    """Counts of the model; None when its own sizes are among the problems."""
    if any(problem.key.startswith("model.") for problem in problems):
        return None
    sequence = config.training.sequence_length
    return ModelFacts(parameter_count(config.model), flops_per_token(config.model, sequence))


def parallel_facts(facts: Facts) -> ParallelFacts:
    """The degrees of a configuration that no rule objects to."""
    parallel = facts.config.parallel
    if facts.data is None or facts.micro_batches is None or facts.stage_layers is None or facts.zero_group is None:
        raise AssertionError("parallel_facts is for configurations without problems")
    ranks = facts.data * parallel.context
    return ParallelFacts(
        data=facts.data,
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        context=parallel.context,
        zero_stage=parallel.zero_stage,
        zero_group=facts.zero_group,
        replicate=ranks // facts.zero_group,
        world_size=facts.data * facts.fixed,
        schedule=parallel.schedule,
        virtual_stages=parallel.virtual_stages,
        micro_batches=facts.micro_batches,
        stage_layers=facts.stage_layers,
    )


def _uncalibrated(profile: SystemProfile, *, timed: bool) -> str:
    memory = "is confirmed for tensors (`dryrun`), not for the reserve of allocator and libraries."
    if not timed:
        return f"Memory of profile {profile.name!r} {memory}"
    return (
        f"Times of profile {profile.name!r} are uncalibrated: not yet confirmed by measurements of the engine. "
        f"Its memory {memory}"
    )


def _peak(config: RunConfig, profile: SystemProfile) -> int | None:
    """Bytes that the fullest rank of a configuration needs; None when a rule refuses it or it does not fit."""
    facts = derive(config)
    if any(size_rules.absurd_sizes(config)) or rules.check(facts) or facts.nodes is None:
        return None
    uniform = config.model_copy(
        update={"cluster": uniform_cluster(config.cluster, facts.nodes, config.parallel.tensor)}
    )
    memories = rank_memories(uniform, parallel_facts(facts), profile)
    capacity = int(uniform.cluster.gpu.memory_gib * _GIB)
    if gpu_shortage(memories, capacity) or host_shortage(memories, uniform.cluster):
        return None
    return max(memory.total_bytes or memory.persistent_bytes for memory in memories)


def _priced(plan: RunPlan, facts: Facts, parallel: ParallelFacts) -> RunPlan:
    """The plan with memory, time, cost and the table of ranks."""
    config, profile = plan.config, profile_named(plan.profile)
    nodes = facts.nodes
    degrees = facts.degrees
    if nodes is None or degrees is None:
        raise AssertionError("a plan without problems has nodes and degrees")
    uniform = config.model_copy(update={"cluster": uniform_cluster(config.cluster, nodes, config.parallel.tensor)})
    ranks = rank_memories(uniform, parallel, profile)
    totals = [rank.total_bytes for rank in ranks if rank.total_bytes is not None]
    memory = MemoryPlan(
        capacity_bytes=int(uniform.cluster.gpu.memory_gib * _GIB),
        peak_bytes=max(totals) if len(totals) == len(ranks) else None,
        checkpoint_bytes=checkpoint_bytes(uniform, profile),
        pipeline_ranks=ranks,
    )
    warnings = list(plan.warnings)
    if memory.peak_bytes is None:
        warnings.append("Activations, logits and buffers are not computed; the total memory is therefore null.")
    time, traffic = step_time(uniform, parallel, profile)
    if time.step_seconds is None:
        warnings.append(
            f"Time is not computed: {config.cluster.gpu.name} lacks a rate that it needs (peak or bandwidth)."
        )
    if not profile.calibrated:
        warnings.append(_uncalibrated(profile, timed=time.step_seconds is not None))
    if batch.steps_of(config.training) is None:
        warnings.append("The run has no length, so days and cost are not computed.")
    return replace(
        plan,
        memory=memory,
        time=time,
        traffic=traffic,
        cost=cost_plan(uniform, parallel, time),
        ranks=place_ranks(degrees, facts.inventory),
        problems=fit_problems(uniform, memory, lambda: fitting_changes(config, lambda tried: _peak(tried, profile))),
        warnings=tuple(warnings),
    )
