"""Model states of one GPU as different texts count them: published figures for the same plan differ by a factor of two.

Owns the comparison that `plan` shows beside its own figure, so that a figure from elsewhere can be recognised. The
states are weights, gradients and optimizer; copies that are there from forward to backward are counted where a
system makes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.config.schema import RunConfig
from orchestrator.plan.held import rank_states
from orchestrator.plan.profiles import OURS, profile_named
from orchestrator.plan.run_plan import ParallelFacts
from orchestrator.plan.states import held_stages
from orchestrator.plan.system_profile import SystemProfile
from orchestrator.plan.work import Work, work_of


@dataclass(frozen=True, slots=True)
class Convention:
    """One way of counting."""

    label: str
    gpu_bytes: int
    """States of the fullest GPU under the plan's split."""
    model_bytes: int
    """States of the whole model, each once."""


def conventions(config: RunConfig, parallel: ParallelFacts) -> tuple[Convention, ...]:
    """Ours under the plan's precision, then the two usual conventions, largest first."""
    work, paper = work_of(config, parallel), profile_named("zero_paper")
    return (
        _count(f"this engine, {work.precision}, a rank with its gathered copies", work, OURS),
        _count("ZeRO paper, mixed precision: 2 + 2 + 12 bytes", replace(work, precision="bf16_mixed"), paper),
        _count("everything in 2 bytes: 2 + 2 + 4 bytes", replace(work, precision="bf16_pure"), paper),
    )


def _count(label: str, work: Work, profile: SystemProfile) -> Convention:
    state = profile.bytes_of(work.precision)
    each = state.weights + state.master + state.gradients + state.moments * work.moments_share
    # Gathered copies of stage 3 are two units at a time, which the conventions leave out.
    with_copies = profile is OURS
    sizes = []
    for stages in held_stages(work.parallel):
        states = rank_states(work, profile, stages)
        sizes.append(states.persistent + (states.gathered if with_copies else 0))
    return Convention(label, max(sizes), round(work.architecture.parameters * each))
