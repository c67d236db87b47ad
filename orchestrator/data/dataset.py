"""Samples to train on: windows of a split's tokens, or random tokens.

`open_tokens` is what the engine calls. Sample i is tokens i x s to i x s + s of the split (s = the sequence length): s
inputs and, one further, s targets: neighbouring samples share one token and each target occurs once. Refuses a corpus
that holds no sample and a tokenizer that the model's embedding cannot take. Which samples a step takes: `order.py`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from orchestrator.config.schema import RunConfig
from orchestrator.data.cache import TokenCache, open_cache
from orchestrator.data.split import Split
from orchestrator.errors import ConfigError, Problem

SYNTHETIC_SAMPLES = 1 << 20
"""Samples of each split of `data.source=synthetic`."""

Samples = npt.NDArray[np.int64]


class TokenDataset(ABC):
    """The samples of one split."""

    fingerprint: str
    """Stands for corpus, tokenizer and split; equal wherever these are equal."""
    vocab_size: int
    """Ids that can occur: 0 to this - 1."""
    bytes_per_token: float | None
    """UTF-8 bytes of the split's text over its tokens (end-of-text included); None for random tokens."""
    sequence_length: int

    @abstractmethod
    def __len__(self) -> int:
        """Samples in the split."""

    @abstractmethod
    def sample(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Samples:
        """The samples of these ids, shape [n, sequence_length + 1].

        Raises IndexError for an id outside [0, len).
        """

    def _checked(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        checked = np.asarray(ids, dtype=np.int64)
        if checked.size and (checked.min() < 0 or checked.max() >= len(self)):
            raise IndexError(f"sample ids must lie in [0, {len(self)}), got {checked.min()} to {checked.max()}")
        return checked


class TextTokens(TokenDataset):
    """Windows of a cached split."""

    def __init__(self, cache: TokenCache, split: Split, sequence_length: int) -> None:
        facts = cache.facts.split(split)
        self.tokens = cache.tokens(split)
        self.documents = facts.documents
        self.size_bytes = facts.size_bytes
        self.fingerprint = cache.facts.fingerprint
        self.vocab_size = cache.facts.vocab_size
        self.bytes_per_token = facts.size_bytes / facts.tokens if facts.tokens else None
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        """Whole windows in the split."""
        return max(0, len(self.tokens) - 1) // self.sequence_length

    def sample(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Samples:
        """The windows of these ids, shape [n, sequence_length + 1]."""
        checked = self._checked(ids)
        window = self.sequence_length + 1
        samples = np.empty((len(checked), window), dtype=np.int64)
        for row, start in enumerate(checked * self.sequence_length):
            samples[row] = self.tokens[start : start + window]
        return samples


class RandomTokens(TokenDataset):
    """Uniformly random tokens, each sample a function of the seed, the split and its id; nothing is stored."""

    bytes_per_token = None

    def __init__(self, seed: int, split: Split, vocab_size: int, sequence_length: int) -> None:
        name = f"synthetic:{seed}:{vocab_size}:{sequence_length}"
        self.fingerprint = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self._key = seed * 2 + (split == "validation")

    def __len__(self) -> int:
        """Samples in the split."""
        return SYNTHETIC_SAMPLES

    def sample(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Samples:
        """The samples of these ids, shape [n, sequence_length + 1]."""
        samples = np.empty((len(ids), self.sequence_length + 1), dtype=np.int64)
        for row, sample in enumerate(self._checked(ids)):
            # A counter-based generator: its state is (key, counter), so any sample is reached at once.
            generator = np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, 0, int(sample)]))
            samples[row] = generator.integers(0, self.vocab_size, self.sequence_length + 1)
        return samples


def open_tokens(config: RunConfig, split: Split) -> TokenDataset:
    """The samples of a split; builds the token cache if it is not there. Safe in any number of processes at once.

    The validation split is empty only when `data.validation_fraction` is 0. Raises ConfigError when the corpus or the
    tokenizer cannot be used, the split holds no sample, or the tokenizer has more ids than `model.vocab_size`.
    """
    length = config.training.sequence_length
    if config.data.source == "synthetic":
        return RandomTokens(config.training.seed, split, config.model.vocab_size, length)
    dataset = TextTokens(open_cache(config), split, length)
    if dataset.vocab_size > config.model.vocab_size:
        raise ConfigError(vocabulary_problem(config, dataset.vocab_size))
    if not len(dataset) and (split == "train" or config.data.validation_fraction > 0):
        raise ConfigError(too_small_problem(config, split, len(dataset.tokens)))
    return dataset


def validation_ids(dataset: TokenDataset, validation_sequences: int) -> npt.NDArray[np.int64]:
    """The samples that one validation reads: the first `validation_sequences`, or all if there are fewer."""
    return np.arange(min(validation_sequences, len(dataset)), dtype=np.int64)


def vocabulary_problem(config: RunConfig, vocab_size: int) -> Problem:
    """The problem that a tokenizer with more ids than the model's embedding has rows makes."""
    return Problem(
        "model.vocab_size",
        f"The tokenizer {config.data.tokenizer!r} has {vocab_size:,} ids, model.vocab_size is "
        f"{config.model.vocab_size:,}: ids from {config.model.vocab_size:,} on have no embedding.",
        f"Set model.vocab_size to at least {vocab_size}, or choose a smaller tokenizer with data.tokenizer.",
    )


def too_small_problem(config: RunConfig, split: Split, tokens: int) -> Problem:
    """The problem that a split shorter than one sample makes."""
    needed = config.training.sequence_length + 1
    more = "raise data.validation_fraction, " if split == "validation" else "lower data.validation_fraction, "
    return Problem(
        "training.sequence_length",
        f"One sample takes {needed:,} tokens (training.sequence_length + 1), the {split} split has {tokens:,}.",
        f"Give more text with data.path, {more}or set training.sequence_length to at most {max(1, tokens - 1):,}.",
    )
