"""Rows of the two matrices that are as tall as the vocabulary, where tensor ranks cannot share them evenly.

They are padded, in memory only, so that every tensor rank and every rank of its ZeRO group holds the same number. A
padded row never enters the loss, has no gradient and is in no checkpoint: shapes and names there are the model's own.
"""

from __future__ import annotations

from orchestrator.plan.run_plan import ParallelFacts


def padded_rows(vocabulary: int, parallel: ParallelFacts) -> int:
    """Rows that all ranks together hold of a matrix with one row a token; `vocabulary` where nothing is padded.

    A multiple of tensor x ZeRO group: the parts then are what one even cut over all those ranks gives, the last ones
    with fewer tokens or none, which is how a checkpoint describes them under the vocabulary's own size.
    """
    if vocabulary % parallel.tensor == 0:
        return vocabulary
    parts = parallel.tensor * (parallel.zero_group if parallel.zero_stage else 1)
    return -(-vocabulary // parts) * parts
