"""Loss scaling for FP16: gradients are computed from a loss times a power of two, so that small ones are not lost.

The scale follows what happens: halved when a gradient overflows (that step is left out), doubled after enough steps
without. Whether it overflowed is read from the norm of the whole model's gradient, which every rank knows alike, so all
ranks skip or step together, whatever the plan. The constants are those of `torch.amp.GradScaler`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

FIRST_SCALE = 2.0**16
STEPS_UNTIL_GROWTH = 2000
SMALLEST_SCALE = 2.0**-14
"""Below this no scale helps: the loss itself is the problem."""


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@dataclass(slots=True)
class LossScale:
    """The scale, as host tensors that a checkpoint saves and fills in place."""

    scale: Tensor = field(default_factory=lambda: _number(FIRST_SCALE))
    good_steps: Tensor = field(default_factory=lambda: _number(0))
    """Steps since the scale last changed."""

    @property
    def value(self) -> float:
        """What the loss is multiplied with now."""
        return float(self.scale)

    @property
    def helps(self) -> bool:
        """Whether a smaller scale can still mend an overflow."""
        return self.value > SMALLEST_SCALE

    def after(self, *, overflowed: bool) -> None:
        """Adapt to what a step came to."""
        if overflowed:
            self.scale.mul_(0.5)
            self.good_steps.zero_()
            return
        self.good_steps.add_(1)
        if float(self.good_steps) >= STEPS_UNTIL_GROWTH:
            self.scale.mul_(2.0)
            self.good_steps.zero_()

    def state(self) -> dict[str, Tensor]:
        """The live tensors, to save and to load into."""
        return {"scale": self.scale, "good_steps": self.good_steps}
