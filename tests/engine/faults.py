"""Mistakes that training systems have really shipped, to be planted into a rank: the parity check must see each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

Plant = Callable[[], Any]
"""Gives a context in which the mistake is made."""


def gradient_divided_by_accumulation() -> Any:
    """Each micro-batch's loss is averaged over the micro-batches although the sum over tokens already is."""
    from orchestrator.engine import step

    real = step._accumulate
    return mock.patch.object(
        step, "_accumulate", lambda parts, batches, share, *more: real(parts, batches, share / len(batches), *more)
    )


def norm_of_this_rank_alone() -> Any:
    """Each rank clips by the norm of its own shards."""
    from orchestrator.engine import step

    real = step._whole

    def alone(mesh: Any, loss: Any, squared: Any) -> tuple[float, float]:
        return real(mesh, loss, squared)[0], float(squared.sqrt())

    return mock.patch.object(step, "_whole", alone)


def tied_gradients_not_summed() -> Any:
    """First and last stage update their copies of the tied weight from their own gradients."""
    from orchestrator.engine.tied import TiedCopies

    return mock.patch.object(TiedCopies, "sum_gradients", lambda self: None)


def replicated_weights_counted_by_every_tensor_rank() -> Any:
    """The norm counts weights that tensor ranks hold alike once for each of them."""
    from orchestrator.engine import build

    return mock.patch.object(build, "counted_once", frozenset)


def stale_weights_after_the_step() -> Any:
    """Gathered weights stay whole across the optimizer's step."""
    from orchestrator.engine.data_parallel import DataParallel

    real = DataParallel.begin_micro_batch

    def forgetful(self: Any, *, last: bool) -> None:
        real(self, last=last)
        self.modules[0].set_reshard_after_backward(False)

    return mock.patch.object(DataParallel, "begin_micro_batch", forgetful)


def mask_ignored_in_the_token_count() -> Any:
    """The loss is divided by all positions instead of the valid ones."""
    from orchestrator.engine import step

    real = step.train_step

    def careless(parts: Any, batches: Any, tokens: int) -> Any:
        ranks = parts.mesh.data_ranks
        return real(parts, batches, ranks * sum(batch.labels.numel() for batch in batches))

    return mock.patch.object(step, "train_step", careless)


def data_ranks_read_the_same_samples() -> Any:
    """The second data rank trains on the first one's samples."""
    from orchestrator.engine import mesh

    real = mesh.build_mesh

    def first_for_all(*args: Any) -> Any:
        from dataclasses import replace

        return replace(real(*args), data_rank=0)

    return mock.patch.object(mesh, "build_mesh", first_for_all)


def mean_of_means_over_ranks() -> Any:
    """Each rank divides by its own valid tokens, then ranks are averaged."""
    from orchestrator.engine import step

    real = step.train_step

    def averaged(parts: Any, batches: Any, tokens: int) -> Any:
        own = sum(int((batch.labels >= 0).sum()) for batch in batches)
        return real(parts, batches, max(own, 1) * parts.mesh.data_ranks)

    return mock.patch.object(step, "train_step", averaged)


def rotary_positions_from_the_local_part() -> Any:
    """Positions are counted from the start of a shard: here, shifted on every rank but the first."""
    from torch import distributed as dist

    from models.layers.rotary import RotaryTables

    real = RotaryTables.forward

    def shifted(self: Any, positions: Any = None) -> Any:
        cos, sin = real(self, positions)
        return (cos.roll(1, 0), sin.roll(-1, 0)) if dist.get_rank() else (cos, sin)

    return mock.patch.object(RotaryTables, "forward", shifted)


def gradients_reduced_after_the_last_micro_batch_only_lose_the_others() -> Any:
    """Gradients of earlier micro-batches are dropped where they are kept cut."""
    from orchestrator.engine import step

    real = step._accumulate

    def forgetful(parts: Any, batches: Any, share: float, *more: Any) -> torch.Tensor:
        total = real(parts, batches[:-1], share, *more) if len(batches) > 1 else 0.0
        parts.optimizer.zero_grad()
        return total + real(parts, batches[-1:], share, *more)

    return mock.patch.object(step, "_accumulate", forgetful)


def padded_rows_enter_the_loss() -> Any:
    """Rows that fill up the vocabulary compete with the tokens."""
    from orchestrator.engine import head

    real = head.HeadPart

    def all_rows(**of: Any) -> Any:
        return real(**(of | {"rows": max(of["rows"], 49)}))

    return mock.patch.object(head, "HeadPart", all_rows)


def each_tensor_rank_normalises_its_own_part() -> Any:
    """The softmax is taken over this rank's part of the vocabulary alone."""
    from orchestrator.engine import loss

    real = loss._over_all_parts

    def own(normaliser: Any, label_logit: Any, group: Any) -> Any:
        return normaliser, real(normaliser, label_logit, group)[1]

    return mock.patch.object(loss, "_over_all_parts", own)


def the_last_chunk_of_the_loss_is_left_out() -> Any:
    """Tokens behind the last whole chunk are not learned from."""
    from orchestrator.engine import loss

    real = loss._pieces

    def whole(tensor: Any, part: Any) -> Any:
        return real(tensor, part)[:-1]

    return mock.patch.object(loss, "_pieces", whole)


def initial_weights_of_the_rank() -> Any:
    """Each rank draws the values of its part as if it began at the first row."""
    from orchestrator.engine import initialise

    return mock.patch.object(initialise, "offsets", lambda tensor: (0,) * tensor.dim())


def nothing_but_an_error() -> Any:
    """Not a wrong number: an exception while the rank works."""
    raise RuntimeError("a deliberate error")
