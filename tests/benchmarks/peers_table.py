"""Turns of contestants as the lines of a table: medians and quartiles of ratios within a round. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tests.benchmarks.peers_contestants import BASE, Contestant
from tests.benchmarks.turns import Turn

Turns = Mapping[str, Sequence[Turn]]


def speed_lines(contestants: Sequence[Contestant], turns: Turns, steps: int) -> list[str]:
    """A row a contestant: tokens a second, and its ratio to torchrun DDP of the same round."""
    lines = [f"  {'contestant':<34}{'tokens/s':>10}{'x torchrun DDP':>26}{'processor s a step':>20}"]
    for contestant in contestants:
        load, own = contestant.load, turns[contestant.name]
        tokens = load.global_batch_size * load.sequence_length * steps
        speed = statistics.median(tokens / turn.seconds for turn in own)
        cpu = statistics.median(turn.cpu_seconds / steps for turn in own)
        ratio = _spread(speed_ratios(own, turns[BASE])) if contestant.name != BASE else "1"
        note = f"   ({contestant.note})" if contestant.note else ""
        lines.append(f"  {contestant.name:<34}{speed:>10,.0f}{ratio:>26}{cpu:>20.2f}{note}")
    return lines


def comparison_lines(contestants: Sequence[Contestant], turns: Turns) -> list[str]:
    """A row for each of ours and what it is held against."""
    lines = [f"  {'ours / opponent':<58}{'by the clock':>26}{'by processor time':>26}{'to reach':>10}"]
    for contestant in contestants:
        for opponent, target in contestant.targets.items():
            if opponent not in turns:
                continue
            clock = speed_ratios(turns[contestant.name], turns[opponent])
            cpu = cpu_ratios(turns[contestant.name], turns[opponent])
            reached = "reached" if statistics.median(clock) >= target else "NOT reached"
            name = f"{contestant.name} / {opponent}"
            lines.append(f"  {name:<58}{_spread(clock):>26}{_spread(cpu):>26}{target:>10.2f} {reached}")
    return lines


def speed_ratios(own: Sequence[Turn], other: Sequence[Turn]) -> list[float]:
    """How many times as fast as the other, by round; the same work in every turn."""
    return [theirs.seconds / mine.seconds for mine, theirs in zip(own, other, strict=True)]


def cpu_ratios(own: Sequence[Turn], other: Sequence[Turn]) -> list[float]:
    """How many times less processor time than the other, by round: above 1 is better, as in `speed_ratios`."""
    return [theirs.cpu_seconds / mine.cpu_seconds for mine, theirs in zip(own, other, strict=True)]


def _spread(ratios: Sequence[float]) -> str:
    """Median (lower to upper quartile)."""
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"
