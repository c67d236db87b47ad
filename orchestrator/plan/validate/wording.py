"""Small helpers that put numbers into sentences."""

from __future__ import annotations

from collections.abc import Iterable


def one_of(values: Iterable[int]) -> str:
    """`1, 2 or 4`; of more than eight the first three and the last three."""
    texts = [str(value) for value in values]
    if len(texts) > 8:
        texts = [*texts[:3], "...", *texts[-3:]]
    if len(texts) <= 1:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} or {texts[-1]}"


def gib(size_bytes: float) -> str:
    """Bytes as GiB with one decimal, with two below 10, as MiB below a hundredth."""
    value = size_bytes / 2**30
    if value < 0.01:
        return f"{size_bytes / 2**20:.2f} MiB"
    return f"{value:.2f} GiB" if value < 10 else f"{value:,.1f} GiB"
