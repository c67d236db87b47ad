"""What of a run is saved: tensors of model and optimizer by logical name, and nothing that the configuration already
says.

Hyperparameters, schedule and data order are functions of configuration and step, so a checkpoint holds none of them and
a changed learning rate takes effect on resuming. The names are the same under every plan. Writing and reading files is
`checkpoint/store.py`'s business.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.engine.gradients import local
from orchestrator.engine.step import Parts
from orchestrator.engine.tied import copy_original

OPTIONAL = ("loss_scale.",)
"""Beginnings of names that a checkpoint may lack or have too many: a run may change its precision."""


def state_of(parts: Parts) -> dict[str, Any]:
    """All tensors to save, sharing memory with the live ones: {"model": {name: …}, "optimizer": {name.key: …}}.

    Optimizer state that no step has made yet is made here as it stands before the first step (zeros).
    """
    _complete_optimizer_state(parts)
    model: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    for name, parameter in saved_parameters(parts).items():
        model[name] = parts.padding.logical(name, parameter.detach())
        for key, value in parts.optimizer.state[parameter].items():
            optimizer[f"{name}.{key}"] = parts.padding.logical(name, value)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    if parts.loss_scale is not None:
        state["loss_scale"] = parts.loss_scale.state()
    return state


def saved_parameters(parts: Parts) -> dict[str, nn.Parameter]:
    """Parameters by the name that they are saved under: the copy of a tied weight under that of its original."""
    found = dict(parts.parameters)
    if parts.tied is not None and (copy := found.pop(parts.tied.copy, None)) is not None:
        found.setdefault(parts.tied.original, copy)
    return found


def after_loading(parts: Parts) -> None:
    """Bring what a checkpoint does not hold twice into every copy of it."""
    if parts.tied is not None:
        copy_original(parts.tied, parts.optimizer)


@torch.no_grad()
def _complete_optimizer_state(parts: Parts) -> None:
    """Give every parameter the state that its optimizer would make at its first step."""
    optimizer = parts.optimizer
    for parameter in parts.parameters.values():
        state = optimizer.state[parameter]
        if state:
            continue
        if isinstance(optimizer, torch.optim.AdamW):
            # The fused kernel counts steps in FP32 on the parameter's device.
            state["step"] = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        elif isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["momentum"]:
            state["momentum_buffer"] = torch.zeros_like(parameter)
