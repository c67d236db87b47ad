"""What all ranks must know alike: that they read the same text, once, and then one small integer collective a step.

The step's carries the valid tokens of every data rank (the divisor of the loss), the sample ids that every data rank is
about to read (for the record), and two flags: whether any rank was asked to stop, and whether rank 0's clock wants a
checkpoint. It runs on the host over gloo, so that a GPU is never waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from orchestrator.engine.mesh import Mesh
from orchestrator.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Agreement:
    """What every rank knows after the collective."""

    stop: bool
    """Whether any rank was asked to stop: nobody takes this step."""
    save: bool
    """Whether rank 0 asks for a checkpoint after this step."""
    tokens_per_data_rank: tuple[int, ...]
    """Valid tokens of the step, by data rank."""
    samples: tuple[tuple[int, ...], ...]
    """Sample ids of the step, by data rank."""

    @property
    def tokens(self) -> int:
        """Valid tokens of the whole global batch."""
        return sum(self.tokens_per_data_rank)


def require_same_data(mesh: Mesh, fingerprint: str) -> None:
    """Refuse to train when the ranks' datasets are not the same (collective): sample ids would mean other text on each.

    Raises ConfigError on every rank, naming those that differ from rank 0.
    """
    own = torch.tensor([int(fingerprint[:15], 16)], dtype=torch.int64)  # 60 of its 128 bits
    found = [torch.zeros_like(own) for _ in range(mesh.whole.size())]
    dist.all_gather(found, own)
    others = [rank for rank, value in enumerate(found) if not torch.equal(value, found[0])]
    if others:
        raise ConfigError(
            Problem(
                "data.source",
                f"Rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} read other training text than rank 0: "
                "files or tokenizer differ between machines (the standard library does between Python versions).",
                "Use the same Python everywhere, or data.source=text with a data.path that is alike on all machines.",
            )
        )


def agree(mesh: Mesh, sample_ids: npt.NDArray[np.int64], tokens: int, *, stop: bool, save: bool) -> Agreement:
    """All-reduce of one int64 vector over all ranks: [stop, save, tokens x data ranks, ids x data ranks].

    sample_ids [any shape] are this data rank's, the same number on every data rank; `tokens` its valid tokens. Only one
    rank of those that read the same samples contributes, so that each is counted once.
    """
    ids = sample_ids.ravel()
    ranks, mine = mesh.data_ranks, mesh.data_rank
    message = torch.zeros(2 + ranks + ranks * ids.size, dtype=torch.int64)
    message[0], message[1] = int(stop), int(save)
    if mesh.speaks_for_samples:
        message[2 + mine] = tokens
        first = 2 + ranks + mine * ids.size
        message[first : first + ids.size] = torch.from_numpy(ids)
    if mesh.whole.size() > 1:
        dist.all_reduce(message)
    values = message.tolist()
    flat = values[2 + ranks :]
    return Agreement(
        stop=values[0] > 0,
        save=values[1] > 0,
        tokens_per_data_rank=tuple(values[2 : 2 + ranks]),
        samples=tuple(tuple(flat[rank * ids.size : (rank + 1) * ids.size]) for rank in range(ranks)),
    )
