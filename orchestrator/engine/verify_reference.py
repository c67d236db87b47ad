"""What a training means, in plain torch on one process: the bare model, the whole batch at once, torch's own optimizer.

`verify` holds every plan against this. It shares the model's modules with the engine and nothing else: it imports
nothing of `orchestrator`, so that a mistake of the engine cannot be in both.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from models.parameters import ModelSizes
from models.registry import family

DESCRIPTION = (
    "plain torch on one process: the bare model, the whole global batch at once, torch.optim and clip_grad_norm_; "
    "no code of the parallel engine"
)
NOT_LEARNED = -100
"""Label of a position without a loss, as torch's cross-entropy has it."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the reference trains."""

    optimizer: str
    """`adamw` or `sgd`."""
    lr: float
    betas: tuple[float, float]
    eps: float
    momentum: float
    weight_decay: float
    """Of matrices; norms and biases have none."""
    clip: float | None
    kept: torch.dtype = torch.float32
    """Type of weights, gradients and optimizer state."""
    computed: torch.dtype = torch.float32
    """Type of the copies of the weights that are computed with."""
    loss_scale: float = 1.0
    """What the loss is multiplied with in the backward pass."""


@dataclass(slots=True)
class Trace:
    """What a training came to, by step; tensors are whole, by logical name."""

    losses: list[float] = field(default_factory=list)
    """Mean over the valid tokens, in nats."""
    norms: list[float] = field(default_factory=list)
    """Of the gradient before clipping."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """After clipping."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the last step."""


def train(
    sizes: ModelSizes, weights: Mapping[str, Tensor], batches: Sequence[tuple[Tensor, Tensor]], recipe: Recipe
) -> Trace:
    """Train a new model from `weights` on global batches (inputs and labels [batch, sequence], int64)."""
    model = _model(sizes, weights, recipe.kept)
    named = dict(model.named_parameters())
    optimizer = _optimizer(list(named.values()), recipe)
    trace = Trace()
    for inputs, labels in batches:
        loss = _mean_loss(model, named, inputs, labels, recipe.computed)
        (loss * recipe.loss_scale).backward()  # type: ignore[no-untyped-call]
        for parameter in named.values():
            assert parameter.grad is not None
            parameter.grad /= recipe.loss_scale
        trace.losses.append(loss.item())
        trace.norms.append(_clip(list(named.values()), recipe.clip))
        trace.gradients.append({name: p.grad.detach().clone() for name, p in named.items() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    return trace


def _model(sizes: ModelSizes, weights: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Module:
    module, name = family(sizes.family).module.split(":")
    model: nn.Module = getattr(importlib.import_module(module), name)(sizes)
    model.to(dtype).to_empty(device="cpu")
    model.initialise_buffers()  # type: ignore[operator]
    named = dict(model.named_parameters())
    if set(named) != set(weights):
        raise ValueError(f"weights and model differ in {sorted(set(named) ^ set(weights))}")
    with torch.no_grad():
        for key, parameter in named.items():
            parameter.copy_(weights[key])
    return model


def _mean_loss(
    model: nn.Module, named: Mapping[str, nn.Parameter], inputs: Tensor, labels: Tensor, computed: torch.dtype
) -> Tensor:
    """Sum of the cross-entropies of the valid positions over their number (0 where there are none)."""
    copies: dict[str, Any] = {name: parameter.to(computed) for name, parameter in named.items()}
    logits: Tensor = functional_call(model, copies, (inputs,)).flatten(0, 1)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    total = functional.cross_entropy(wide, labels.flatten(), ignore_index=NOT_LEARNED, reduction="sum")
    return total / max(int((labels != NOT_LEARNED).sum()), 1)


def _clip(parameters: list[nn.Parameter], largest: float | None) -> float:
    """The norm before clipping."""
    norm = nn.utils.get_total_norm(
        [p.grad.to(torch.promote_types(p.dtype, torch.float32)) for p in parameters if p.grad is not None]
    )
    if largest is not None:
        nn.utils.clip_grads_with_norm_(parameters, largest, norm)
    return norm.item()


def _optimizer(parameters: list[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum)
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)
