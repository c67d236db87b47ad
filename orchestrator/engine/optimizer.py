"""The optimizer over the model's own (distributed) parameters, with weight-decay groups by logical name.

Which parameters decay is said by `models/` (`ParameterSpec.decay`), never guessed from shapes here. The learning rate
is set by the loop from `schedule.py` before each step, so the optimizer's state holds no schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from models.spec import ParameterSpec
from orchestrator.config.schema import OptimizerConfig


def build_optimizer(
    config: OptimizerConfig, parameters: Mapping[str, nn.Parameter], specs: Sequence[ParameterSpec]
) -> torch.optim.Optimizer:
    """AdamW (fused) or SGD over `parameters` (logical name to parameter, this rank's part of the model).

    Two groups: those that decay and those that do not. Raises KeyError for a parameter without a spec.
    """
    decays = {spec.name: spec.decay for spec in specs}
    decaying = [parameter for name, parameter in parameters.items() if decays[name]]
    others = [parameter for name, parameter in parameters.items() if not decays[name]]
    groups: list[dict[str, object]] = [
        {"params": decaying, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, foreach=True)
    # The fused kernel is 4 to 6 times faster than the others on a CPU, and one launch on a GPU.
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from the next step on, in every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
