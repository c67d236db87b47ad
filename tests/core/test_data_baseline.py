from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from orchestrator.config.schema import RunConfig
from orchestrator.data import baseline as module
from orchestrator.data.baseline import bigram_baseline, bigram_loss, count_pairs, fit_bigram
from orchestrator.data.dataset import TextTokens, open_tokens, validation_ids
from tests.core.data_configs import data_config, write_files


def slow_loss(train: list[int], evaluated: list[int], vocab_size: int, smoothing: float) -> float:
    """The definition, pair by pair."""
    pairs = Counter(pairwise(train))
    firsts = Counter(train[:-1])
    losses = [
        -math.log((pairs[first, second] + smoothing) / (firsts[first] + smoothing * vocab_size))
        for first, second in pairwise(evaluated)
    ]
    return sum(losses) / len(losses)


def chain(tokens: int, vocab_size: int, seed: int) -> np.ndarray:
    """A random text in which each token makes a few others likely."""
    generator = np.random.default_rng(seed)
    steps = generator.geometric(0.4, tokens)
    return (np.cumsum(steps) % vocab_size).astype(np.uint16)


@pytest.mark.parametrize("counting", ["in a table", "in chunks of a table", "by sorting"])
@pytest.mark.parametrize("smoothing", [1e-4, 0.3, 5.0])
def test_the_loss_is_the_definitions(monkeypatch: pytest.MonkeyPatch, counting: str, smoothing: float) -> None:
    if counting == "by sorting":
        monkeypatch.setattr(module, "_DENSE_CELLS", 0)
    if counting == "in chunks of a table":
        monkeypatch.setattr(module, "_CHUNK", 7)
    train, evaluated = chain(500, 23, seed=1), chain(200, 23, seed=2)
    loss = bigram_loss(count_pairs(train, 23), count_pairs(evaluated, 23), 23, smoothing)
    assert loss == pytest.approx(slow_loss(train.tolist(), evaluated.tolist(), 23, smoothing), rel=1e-12)


def test_the_smoothing_is_chosen_on_training_tokens_alone() -> None:
    train = chain(3000, 50, seed=3)
    chosen = {fit_bigram(train, chain(300, 50, seed=seed), 50)[0] for seed in range(4, 8)}
    assert len(chosen) == 1
    (smoothing,) = chosen
    fitted, held_out = train[:2700].tolist(), train[2700:].tolist()
    best = min(module._SMOOTHINGS, key=lambda k: slow_loss(fitted, held_out, 50, k))
    assert smoothing == best


def test_no_smoothing_nearby_does_much_better_on_the_validation_text() -> None:
    """Sparse text: a k taken on the same text that was counted would be the smallest of all, and bad."""
    train, evaluated = chain(2000, 400, seed=5), chain(2000, 400, seed=6)
    smoothing, loss = fit_bigram(train, evaluated, 400)
    best = min(slow_loss(train.tolist(), evaluated.tolist(), 400, k) for k in (1e-5, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0))
    assert loss == pytest.approx(slow_loss(train.tolist(), evaluated.tolist(), 400, smoothing), rel=1e-12)
    assert loss < best + 0.02


@pytest.fixture
def corpus(tmp_path: Path) -> RunConfig:
    write_files(
        tmp_path / "corpus", {f"{index}.txt": f"the number {index} and caf\u00e9\n" * 20 for index in range(20)}
    )
    return data_config(
        source="text",
        path=str(tmp_path / "corpus"),
        cache_directory=str(tmp_path / "cache"),
        validation_fraction=0.2,
        training={"validation_sequences": 30},
    )


def test_the_baseline_is_measured_on_exactly_the_targets_that_a_validation_reads(corpus: RunConfig) -> None:
    baseline = bigram_baseline(corpus)
    train, validation = open_tokens(corpus, "train"), open_tokens(corpus, "validation")
    assert isinstance(train, TextTokens)
    assert validation.bytes_per_token
    samples = validation.sample(validation_ids(validation, 30))
    assert baseline.validation_tokens == samples[:, 1:].size == 30 * 8
    assert baseline.smoothing is not None
    pairs = np.stack([samples[:, :-1].ravel(), samples[:, 1:].ravel()], axis=1)
    losses = [slow_loss(train.tokens.tolist(), pair.tolist(), 257, baseline.smoothing) for pair in pairs]
    assert baseline.nats_per_token == pytest.approx(float(np.mean(losses)), rel=1e-9)
    assert baseline.nats_per_byte == pytest.approx(float(np.mean(losses)) / validation.bytes_per_token, rel=1e-9)


@pytest.mark.parametrize("reason", ["random tokens", "more than the", "no validation split"])
def test_where_there_is_no_baseline_the_reason_is_given(
    corpus: RunConfig, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "random tokens":
        config = data_config(source="synthetic")
    elif reason == "no validation split":
        config = corpus.model_copy(update={"data": corpus.data.model_copy(update={"validation_fraction": 0.0})})
    else:
        config = corpus
        monkeypatch.setattr(module, "_DENSE_TOKENS", 100)
    baseline = bigram_baseline(config)
    assert (baseline.nats_per_token, baseline.nats_per_byte) == (None, None)
    assert reason in baseline.reason
