"""What training means, in plain torch on one process: the whole batch at once, torch's own optimizer, no engine.

Imports the model and nothing of `orchestrator`. The engine is right when it agrees with this, under every plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

IGNORED = -100


@dataclass
class Trace:
    """What a training came to, by step; tensors are whole, by logical name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Before clipping."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """After clipping."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the last step."""


@dataclass(frozen=True)
class Recipe:
    """How the reference trains."""

    optimizer: str = "sgd"
    lr: float = 0.12
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float | None = None


PLAIN = Recipe()


def train(
    model: nn.Module,
    weights: dict[str, Tensor],
    batches: list[tuple[Tensor, Tensor]],
    recipe: Recipe,
    lrs: list[float] | None = None,
) -> Trace:
    """Train `model` (on the meta device) from `weights` on global batches (inputs [b, s], labels [b, s])."""
    model.to_empty(device="cpu")
    model.initialise_buffers()
    # A tied head is in the module's own state dict too, but never twice in what is compared.
    model.load_state_dict(weights, strict=False)
    named = dict(model.named_parameters())
    assert set(named) == set(weights)
    optimizer = _optimizer(list(named.values()), recipe)
    trace = Trace()
    for step, (inputs, labels) in enumerate(batches):
        if lrs is not None:
            for group in optimizer.param_groups:
                group["lr"] = lrs[step]
        valid = int((labels != IGNORED).sum())
        logits = model(inputs)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        ) / max(valid, 1)
        loss.backward()
        trace.losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(named.values(), float("inf"))
        trace.norms.append(norm.item())
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(named.values(), recipe.clip)
        trace.gradients.append({name: parameter.grad.detach().clone() for name, parameter in named.items()})
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    return trace


def _optimizer(parameters: list[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr)
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)
