"""Head and loss in one: the numbers of torch's cross-entropy over all logits at once, in a fraction of the memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orchestrator.engine.head import LossHead
from orchestrator.engine.loss import IGNORED, HeadPart, head_loss

pytestmark = pytest.mark.torch

SHARE = 0.01


def part(rows: int, chunk: int, *, ahead: bool = True) -> HeadPart:
    return HeadPart(first=0, rows=rows, group=None, chunk_tokens=chunk, gradient_ahead=ahead)


def problem(dtype: torch.dtype, vocabulary: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [3, 11, 8], a head's weight, labels of which some are ignored."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, 11, 8, generator=generator).to(dtype)
    weight = torch.randn(vocabulary, 8, generator=generator).to(dtype)
    labels = torch.randint(0, vocabulary, (3, 11), generator=generator)
    labels[0, :5] = IGNORED
    labels[2, 10] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def at_once(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = hidden @ weight.t()
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return SHARE * functional.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)


@pytest.mark.parametrize("ahead", [True, False], ids=["gradient ahead", "gradient in the backward pass"])
@pytest.mark.parametrize("chunk", [1, 4, 10, 33, 1000])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 1e-2)]
)
def test_loss_and_gradients_are_those_of_all_logits_at_once(
    dtype: torch.dtype, tolerance: float, chunk: int, ahead: bool
) -> None:
    hidden, weight, labels = problem(dtype)
    wanted = at_once(hidden, weight, labels)
    wanted.backward()
    expected = [tensor.grad for tensor in (hidden, weight)]
    hidden.grad = weight.grad = None
    loss = head_loss(hidden, weight, labels, SHARE, part(37, chunk, ahead=ahead))
    assert loss.dtype == wanted.dtype
    assert loss.item() == pytest.approx(wanted.item(), rel=max(tolerance / 100, 1e-6))
    # Whatever the loss is multiplied with afterwards counts as well.
    (2 * loss).backward()
    for found, grad in zip((hidden.grad, weight.grad), expected, strict=True):
        assert found is not None and grad is not None
        assert found.dtype == dtype
        scale = grad.abs().max()
        assert float((found - 2 * grad).abs().max() / scale) <= 2 * tolerance


def test_chunks_are_added_up_in_fp32_whatever_the_weights_are() -> None:
    """Many chunks in BF16: adding 2-byte sums would lose three digits."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(1, 512, 16, generator=generator).bfloat16().requires_grad_()
    weight = (0.1 * torch.randn(40, 16, generator=generator)).bfloat16().requires_grad_()
    labels = torch.randint(0, 40, (1, 512), generator=generator)
    head_loss(hidden, weight, labels, 1.0, part(40, 2)).backward()
    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    (at_once(exact_hidden, exact_weight, labels) / SHARE).backward()
    assert weight.grad is not None and exact_weight.grad is not None
    assert (weight.grad.double() - exact_weight.grad).norm() / exact_weight.grad.norm() < 0.01


def test_padded_rows_are_kept_out_of_the_loss_and_have_no_gradient() -> None:
    hidden, weight, labels = problem(torch.float64)
    at_once(hidden, weight, labels).backward()
    assert weight.grad is not None
    wanted, wanted_hidden = weight.grad, hidden.grad
    hidden.grad = None
    # Whatever a padded row holds, the largest logit of all included.
    padded = torch.cat((weight.detach(), torch.full((3, 8), 100.0, dtype=torch.float64))).requires_grad_()
    head_loss(hidden, padded, labels, SHARE, part(37, 7)).backward()
    assert padded.grad is not None
    torch.testing.assert_close(padded.grad[:37], wanted)
    torch.testing.assert_close(hidden.grad, wanted_hidden)
    assert torch.equal(padded.grad[37:], torch.zeros(3, 8, dtype=torch.float64))


def test_a_batch_without_valid_tokens_has_loss_zero_and_zero_gradients() -> None:
    hidden, weight, labels = problem(torch.float32)
    loss = head_loss(hidden, weight, torch.full_like(labels, IGNORED), SHARE, part(37, 10))
    loss.backward()
    assert loss.item() == 0.0
    for tensor in (hidden, weight):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_a_loss_that_is_not_finite_says_so() -> None:
    hidden, weight, labels = problem(torch.float32)
    with torch.no_grad():
        hidden[1, 2, 0] = torch.nan
    assert head_loss(hidden, weight, labels, SHARE, part(37, 4)).isnan()


def test_a_head_without_labels_gives_logits_and_minus_infinity_for_padding() -> None:
    head = nn.Linear(8, 10, bias=False)
    LossHead(head, part(9, 4))
    hidden = torch.randn(2, 3, 8)
    logits = head(hidden)
    assert torch.equal(logits[..., :9], hidden @ head.weight[:9].t())
    assert bool((logits[..., 9] == -torch.inf).all())


def test_labels_count_for_one_forward_pass_only() -> None:
    head = nn.Linear(8, 10, bias=False)
    wrapped = LossHead(head, part(10, 4))
    hidden, labels = torch.randn(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64)
    with wrapped.learning(labels):
        assert head(hidden).shape == ()
    assert head(hidden).shape == (2, 3, 10)


class LargestFloats(TorchDispatchMode):
    """Elements of the largest floating-point tensor that was made, but for one shape."""

    def __init__(self, leaving_out: tuple[int, ...]) -> None:
        super().__init__()
        self.elements, self._out = 0, leaving_out

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.is_floating_point() and tuple(value.shape) != self._out:
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("ahead", [True, False])
def test_no_tensor_is_larger_than_the_logits_of_a_chunk(ahead: bool) -> None:
    hidden = torch.randn(4, 64, 4, requires_grad=True)
    weight = torch.randn(500, 4, requires_grad=True)
    labels = torch.randint(0, 500, (4, 64))
    with LargestFloats((500, 4)) as seen:
        head_loss(hidden, weight, labels, 1.0, part(500, 32, ahead=ahead)).backward()
    assert seen.elements == 32 * 500
