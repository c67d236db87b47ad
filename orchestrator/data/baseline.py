"""What plain counting of token pairs reaches: the loss that a model has to beat to have learnt more than pairs.

A bigram model with add-k smoothing, p(b | a) = (count(a b) + k) / (count(a) + k V), on the same tokens: pairs are
counted in the training split, k is chosen on a part of it that is held out, and the loss is taken over exactly the
targets that a validation of the engine reads (`dataset.validation_ids`). Corpora too large to count get a reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from orchestrator.config.schema import RunConfig
from orchestrator.data.dataset import TextTokens, open_tokens, validation_ids

_DENSE_CELLS = 1 << 22
"""Vocabulary squared up to which pairs are counted in a table (2,048 ids); above, by sorting the pairs."""
_DENSE_TOKENS, _SORTED_TOKENS = 1 << 30, 1 << 25
"""Training tokens up to which counting takes a few seconds, in a table and by sorting."""
_HELD_OUT = 0.1
"""Share of the training tokens on which k is chosen, taken from the end."""
_SMOOTHINGS = np.geomspace(1e-5, 10.0, 61)
"""Values of k that are tried: ten a decade."""
_CHUNK = 1 << 24
"""Tokens counted at a time."""

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BigramBaseline:
    """The bigram model's validation loss; both figures are None when `reason` says why there is none."""

    nats_per_token: float | None
    nats_per_byte: float | None
    smoothing: float | None = None
    """The k that was chosen."""
    train_tokens: int = 0
    validation_tokens: int = 0
    """Targets that the loss is averaged over."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PairCounts:
    """Distinct pairs of neighbouring tokens, as first x V + second, ascending, with their counts."""

    pairs: Integers
    counts: Integers
    firsts: Integers
    """Count of each token as the first of a pair, shape [V]."""


def bigram_baseline(config: RunConfig) -> BigramBaseline:
    """The baseline of the configuration's corpus; builds the token cache if it is not there.

    Raises ConfigError as `open_tokens` does.
    """
    if config.data.source == "synthetic":
        return BigramBaseline(None, None, reason="random tokens have nothing to learn")
    train, validation = open_tokens(config, "train"), open_tokens(config, "validation")
    assert isinstance(train, TextTokens) and isinstance(validation, TextTokens)
    vocab_size = train.vocab_size
    limit = _DENSE_TOKENS if vocab_size**2 <= _DENSE_CELLS else _SORTED_TOKENS
    if len(train.tokens) > limit:
        return BigramBaseline(
            None, None, reason=f"{len(train.tokens):,} training tokens are more than the {limit:,} that are counted"
        )
    windows = len(validation_ids(validation, config.training.validation_sequences))
    if not windows:
        return BigramBaseline(None, None, reason="there is no validation split (data.validation_fraction=0)")
    # The windows follow each other and share one token, so their targets are one stretch.
    read = validation.tokens[: windows * validation.sequence_length + 1]
    smoothing, loss = fit_bigram(train.tokens, read, vocab_size)
    assert validation.bytes_per_token is not None
    return BigramBaseline(
        nats_per_token=loss,
        nats_per_byte=loss / validation.bytes_per_token,
        smoothing=smoothing,
        train_tokens=len(train.tokens),
        validation_tokens=len(read) - 1,
    )


def fit_bigram(train: np.ndarray, validation: np.ndarray, vocab_size: int) -> tuple[float, float]:
    """Fit on `train`, which needs at least 4 tokens; returns (k, nats per token over `validation`'s pairs)."""
    cut = max(2, min(len(train) - 2, int(len(train) * (1 - _HELD_OUT))))
    fitted = count_pairs(train[:cut], vocab_size)
    held_out = count_pairs(train[cut:], vocab_size)
    losses = [bigram_loss(fitted, held_out, vocab_size, k) for k in _SMOOTHINGS]
    smoothing = float(_SMOOTHINGS[int(np.argmin(losses))])
    counted = count_pairs(train, vocab_size)
    return smoothing, bigram_loss(counted, count_pairs(validation, vocab_size), vocab_size, smoothing)


def count_pairs(tokens: np.ndarray, vocab_size: int) -> PairCounts:
    """Count the pairs of neighbouring tokens."""
    if vocab_size**2 <= _DENSE_CELLS:
        table = np.zeros(vocab_size**2, dtype=np.int64)
        for start in range(0, len(tokens) - 1, _CHUNK):
            chunk = tokens[start : start + _CHUNK + 1].astype(np.int32)
            table += np.bincount(chunk[:-1] * vocab_size + chunk[1:], minlength=vocab_size**2)
        pairs = np.flatnonzero(table)
        counts = table[pairs]
    else:
        wide = tokens.astype(np.int64)
        pairs, counts = np.unique(wide[:-1] * vocab_size + wide[1:], return_counts=True)
    firsts = np.bincount(pairs // vocab_size, weights=counts, minlength=vocab_size).astype(np.int64)
    return PairCounts(pairs, counts, firsts)


def bigram_loss(fitted: PairCounts, evaluated: PairCounts, vocab_size: int, smoothing: float) -> float:
    """Mean of -ln p(second | first) over the evaluated pairs, in nats per token."""
    at = np.minimum(np.searchsorted(fitted.pairs, evaluated.pairs), len(fitted.pairs) - 1)
    seen = np.where(fitted.pairs[at] == evaluated.pairs, fitted.counts[at], 0)
    of_first = fitted.firsts[evaluated.pairs // vocab_size]
    logs: Floats = np.log(seen + smoothing) - np.log(of_first + smoothing * vocab_size)
    return float(-(evaluated.counts * logs).sum() / evaluated.counts.sum())
