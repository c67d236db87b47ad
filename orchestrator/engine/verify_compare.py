"""Puts the ranks' parts together and says how far the whole is from the reference, with the parameter's name.

Refuses nothing and judges by the case's limits; a value that is not a number is beyond every limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.spec import parameter_specs
from orchestrator.engine.initialise import fill
from orchestrator.engine.verify_case import Case
from orchestrator.engine.verify_rank import Part, RankTrace
from orchestrator.engine.verify_reference import Trace


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference of one kind."""

    what: str
    """`loss`, `gradient`, `gradient norm` or `weight`."""
    value: float
    limit: float
    where: str
    """Parameter and step."""

    @property
    def agrees(self) -> bool:
        """Whether it is rounding. Not a number is not."""
        return self.value <= self.limit


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the comparison of one training came to."""

    title: str
    differences: tuple[Difference, ...]
    broken: tuple[str, ...]
    """What has to hold exactly and does not, in words."""
    losses: tuple[float, float]
    """Of the reference, first and last step."""
    clipped: int | None
    """Steps in which clipping was at work; None: the plan does not clip."""
    empty: bool
    """Whether some data rank had no valid token in some step."""

    @property
    def agrees(self) -> bool:
        """Whether plan and reference did the same training."""
        return not self.broken and all(difference.agrees for difference in self.differences)


def initial_weights(case: Case) -> dict[str, Tensor]:
    """The weights that one process starts from, made whole."""
    config, generator = case.plan.config, torch.Generator()
    found = {}
    for spec in parameter_specs(config.model):
        if spec.tied_to is None:
            found[spec.name] = torch.empty(spec.shape)
            fill(found[spec.name], [0] * len(spec.shape), spec, config.training.seed, generator)
    return found


def compare(case: Case, ranks: Sequence[RankTrace], initial: Mapping[str, Tensor], reference: Trace) -> Outcome:
    """Hold what the ranks of a training found against what the reference found."""
    broken = _not_alike(case, ranks)
    started = _whole("initial weights", [rank.initial for rank in ranks], broken)
    for name, weight in initial.items():
        if name not in started or not torch.equal(started[name], weight.to(started[name].dtype)):
            broken.append(f"the initial values of {name} are not those of one process")
    applied = min(len(rank.gradients) for rank in ranks)
    if applied < len(reference.losses):
        broken.append(f"only {applied} of {len(reference.losses)} steps were applied: a loss or gradient is not finite")
    gradients = [
        _whole(f"gradients of step {step + 1}", [rank.gradients[step] for rank in ranks], broken)
        for step in range(applied)
    ]
    weights = _whole("weights", [rank.weights for rank in ranks], broken)
    clip = case.plan.config.training.gradient_clip
    return Outcome(
        title=case.title,
        differences=_differences(case, ranks, gradients, weights, reference),
        broken=tuple(dict.fromkeys(broken)),
        losses=(reference.losses[0], reference.losses[-1]),
        clipped=None if clip is None else sum(norm > clip for norm in reference.norms),
        empty=any(0 in tokens for tokens in ranks[0].tokens),
    )


def _not_alike(case: Case, ranks: Sequence[RankTrace]) -> list[str]:
    """What must be exactly the same on all ranks and is not."""
    first, batch = ranks[0], case.plan.config.training.global_batch_size
    found = [
        f"step {step} did not read each of its samples on exactly one data rank"
        for step, samples in enumerate(first.samples, start=1)
        if samples != sorted(case.order.ids(step, batch))
    ]
    if any((rank.norms, rank.losses) != (first.norms, first.losses) for rank in ranks):
        found.append("ranks know different losses or gradient norms")
    return found


def _differences(
    case: Case,
    ranks: Sequence[RankTrace],
    gradients: Sequence[Mapping[str, Tensor]],
    weights: Mapping[str, Tensor],
    reference: Trace,
) -> tuple[Difference, ...]:
    limits = case.limits
    losses, norms, tensors = [], [], []
    for step, (loss, norm) in enumerate(zip(reference.losses, reference.norms, strict=True)):
        where = f"step {step + 1}"
        losses += [(abs(rank.losses[step] - loss), where) for rank in ranks]
        norms += [(abs(rank.norms[step] - norm) / max(norm, 1e-30), where) for rank in ranks]
    for step, found in enumerate(gradients):
        tensors += _tensors(found, reference.gradients[step], limits.small, f" in step {step + 1}")
    after = _tensors(weights, reference.weights, 1.0, f" after step {len(reference.losses)}")
    return (
        _largest("loss", limits.loss, losses),
        _largest("gradient", limits.gradient, tensors),
        _largest("gradient norm", limits.norm, norms),
        _largest("weight", limits.weight, after),
    )


def _largest(what: str, limit: float, found: Sequence[tuple[float, str]]) -> Difference:
    """The largest; one that is not a number counts as larger than all."""
    value, where = max(
        found, key=lambda pair: (pair[0] != pair[0], pair[0]), default=(float("nan"), "nothing to compare")
    )
    return Difference(what, value, limit, where)


def _tensors(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], small: float, suffix: str
) -> list[tuple[float, str]]:
    least = small * max(tensor.abs().max().item() for tensor in wanted.values())
    pairs = []
    for name, tensor in wanted.items():
        if name not in found:
            pairs.append((float("nan"), f"{name}{suffix}, which no rank has"))
            continue
        scale = max(tensor.abs().max().item(), least, 1e-30)
        apart = (found[name].double() - tensor.double()).abs().max().item()
        pairs.append((apart / scale, name + suffix))
    return pairs


def _whole(what: str, ranks: Sequence[Mapping[str, Part]], broken: list[str]) -> dict[str, Tensor]:
    """Tensors put together from all ranks' parts; what ranks hold alike must be the same bits."""
    found: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for number, rank in enumerate(ranks):
        for name, part in rank.items():
            whole = found.setdefault(name, torch.zeros(part.shape, dtype=part.values.dtype))
            there = filled.setdefault(name, torch.zeros(part.shape, dtype=torch.bool))
            place = tuple(slice(low, low + size) for low, size in zip(part.start, part.values.shape, strict=True))
            held = there[place]
            if not torch.equal(whole[place][held], part.values[held]):
                broken.append(f"{what}: rank {number} holds other values of {name} than an earlier rank")
            whole[place], there[place] = part.values, True
    broken += [f"{what}: some elements of {name} are on no rank" for name, there in filled.items() if not there.all()]
    return found
