"""What every section of the schema shares: frozen, no unknown keys, a docstring under each field.

Numbers are read leniently where YAML and Hydra are lenient (`1e12` is a float in both) and strictly where they
surprise: a boolean is never a number, and a float with a fraction is never an integer.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_EXACT_FLOAT_LIMIT = 2**53
"""Above this a float no longer holds every integer exactly (IEEE 754 double)."""


def _whole(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a whole number is needed, not true or false")
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError(f"a whole number is needed, {value!r} has a fraction")
        if abs(value) > _EXACT_FLOAT_LIMIT:
            raise ValueError(f"{value!r} is too large to be exact as a float; write it without an exponent")
        return int(value)
    if isinstance(value, str):
        raise ValueError(f"a whole number is needed, not the text {value!r}")
    return value


def _real(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    if isinstance(value, str):
        # YAML 1.1 reads `1e-4` (no dot) as text; Hydra's own grammar reads it as a number. Both mean the number.
        try:
            return float(value)
        except ValueError:
            raise ValueError(f"a number is needed, not the text {value!r}") from None
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
"""Any integer; whole floats below 2**53 are taken."""
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
"""An integer of at least 1."""
CountOrZero = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
"""An integer of at least 0."""
Real = Annotated[float, BeforeValidator(_real), Field(allow_inf_nan=False)]
"""A finite number."""
Positive = Annotated[float, BeforeValidator(_real), Field(gt=0, allow_inf_nan=False)]
"""A finite number above 0."""
AboveOne = Annotated[float, BeforeValidator(_real), Field(gt=1, allow_inf_nan=False)]
"""A finite number above 1."""
PositiveOrZero = Annotated[float, BeforeValidator(_real), Field(ge=0, allow_inf_nan=False)]
"""A finite number of at least 0."""
Fraction = Annotated[float, BeforeValidator(_real), Field(ge=0, lt=1, allow_inf_nan=False)]
"""A number of at least 0 and below 1."""


class Section(BaseModel):
    """A part of the configuration: immutable, unknown keys refused, each field documented by the string under it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, protected_namespaces=()
    )
