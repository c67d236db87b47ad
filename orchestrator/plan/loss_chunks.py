"""How the loss is computed: how many tokens' logits exist at once, and when their gradients are computed.

Decided here because memory follows from it (`activations.py`); the engine does what this says (`engine/loss.py`). One
buffer holds the logits of a chunk, then their gradient. More than one chunk needs the weight's gradient in FP32 beside
it, so a micro-batch is cut only where that needs less memory at its largest.
"""

from __future__ import annotations

from orchestrator.config.schema import RunConfig
from orchestrator.plan.run_plan import ParallelFacts

CHUNK_TOKENS = 2048
"""Tokens of a chunk, about. Products of this height run at a GPU's full rate, and adding up the weight's gradient chunk
by chunk costs them some 10 %; on a CPU 512 and more are alike."""


def gradient_ahead(schedule: str, pipeline: int) -> bool:
    """Whether the loss's gradients are computed beside it.

    Not in `gpipe`, where all micro-batches wait for their backward pass: each would keep a gradient of the whole
    matrix. In every other schedule the last stage's backward follows its forward.
    """
    return pipeline == 1 or schedule != "gpipe"


def chunk_tokens(config: RunConfig, parallel: ParallelFacts) -> int:
    """Tokens of a chunk of the loss, for one micro-batch of one rank."""
    tokens = config.training.micro_batch_size * config.training.sequence_length // parallel.context
    return chunk_of(tokens, config.model.hidden_size, 4 if config.training.precision == "fp32" else 2)


def chunk_of(tokens: int, hidden: int, element_bytes: int) -> int:
    """Tokens of a chunk: all of them, or equal parts of about `CHUNK_TOKENS` where that needs less memory."""
    count = max(1, tokens // CHUNK_TOKENS)
    part = -(-tokens // count)
    whole, cut = (row_bytes(chunk, tokens, hidden, element_bytes) for chunk in (tokens, part))
    return part if cut < whole else tokens


def row_bytes(chunk: int, tokens: int, hidden: int, element_bytes: int) -> float:
    """Bytes a row of the head's weight at the largest moment of the loss: logits of a chunk and the row's gradient.

    While the loss of a chunk is computed its logits exist in FP32 and, as the product gives them, in their own type
    (one tensor if that is FP32); while it is multiplied, their gradient does, beside the weight's. With several chunks
    that is an FP32 sum, there from the second chunk on, and what is added to it.
    """
    logits = 4.0 * chunk if element_bytes == 4 else (4.0 + element_bytes) * chunk
    if chunk >= tokens:
        return max(logits, element_bytes * (chunk + hidden))
    added = 0.0 if element_bytes == 4 else float(element_bytes * hidden)
    return 4.0 * hidden + max(logits, element_bytes * chunk + added)
