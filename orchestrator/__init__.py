"""Declare a model, the GPUs and the parallel plan; have the plan proven and priced; train it on Ray.

The public API is `load_config` and `make_plan`; both are looked up when they are first asked for, so that importing the
package costs nothing and needs neither torch nor ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.config.compose import load_config as load_config
    from orchestrator.plan.make import make_plan as make_plan

__version__ = "0.1.0"

_HOMES = {"load_config": "orchestrator.config.compose", "make_plan": "orchestrator.plan.make"}

__all__ = ["__version__", "load_config", "make_plan"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
