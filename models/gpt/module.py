"""The `gpt` decoder for one device: LayerNorm, learned positions, GELU (tanh form), biases (GPT-2, GPT-3).

Owns the computation; takes no degree, rank or group, and no initial values: it is built on the meta device, allocated
(`to_empty`) and filled by whoever runs it, from the specs in `parameters.py`. What may be cut where: `sharding.py`.

Shapes: b batch, s sequence, h hidden size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.gpt.parameters import DEFAULT_ATTENTION_BIAS
from models.layers.attention import Attention
from models.parameters import ModelSizes


class GptMlp(nn.Module):
    """down(gelu(up(x))), with biases."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        output: Tensor = self.down_proj(functional.gelu(self.up_proj(hidden), approximate="tanh"))
        return output


class GptBlock(nn.Module):
    """One block: two residual branches, each behind its LayerNorm."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.attention = Attention(sizes, default_bias=DEFAULT_ATTENTION_BIAS)
        self.mlp_norm = nn.LayerNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.mlp = GptMlp(sizes)
        self.dropout = nn.Dropout(sizes.resid_pdrop) if sizes.resid_pdrop else nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        output: Tensor = hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))
        return output


class GptModel(nn.Module):
    """A whole model, or the part of it that one pipeline stage holds.

    Args:
        sizes: the whole model's sizes.
        layers: global indices of the blocks held here; None: all.
        embedding: whether the token and position tables are held; without them the input is the hidden state.
        head: whether final norm and output head are held; without them the output is the hidden state.
        sequence_length: accepted for the sake of one signature over families; the table of positions is a parameter
            and always whole.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        layers: Iterable[int] | None = None,
        embedding: bool = True,
        head: bool = True,
        sequence_length: int | None = None,
    ) -> None:
        super().__init__()
        held = range(sizes.num_hidden_layers) if layers is None else layers
        self.tied = sizes.tie_word_embeddings
        hidden = sizes.hidden_size
        with torch.device("meta"):
            self.embedding = nn.Embedding(sizes.vocab_size, hidden) if embedding else None
            self.position_embedding = nn.Embedding(sizes.max_position_embeddings, hidden) if embedding else None
            self.dropout = nn.Dropout(sizes.resid_pdrop) if embedding and sizes.resid_pdrop else nn.Identity()
            # A dict keyed by the global index, not a list: a stage that holds blocks 8 to 15 keeps their names.
            self.layers = nn.ModuleDict({str(layer): GptBlock(sizes) for layer in held})
            self.norm = nn.LayerNorm(hidden, eps=sizes.rms_norm_eps) if head else None
            self.head = nn.Linear(hidden, sizes.vocab_size, bias=False) if head else None
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's, if the model is tied and both are here.

        Whatever replaces parameters (tensor parallelism, `to_empty`) unties them: call it again afterwards.
        """
        if self.tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def initialise_buffers(self) -> None:
        """Tie the head again after `to_empty`; this family has no buffers."""
        self.tie_weights()

    def embed(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Tokens [b, s] -> sum of token and position rows [b, s, h], dropped out as the first residual branch is.

        Raises:
            ValueError: more tokens than there are positions.
        """
        assert self.embedding is not None and self.position_embedding is not None
        length, limit = tokens.shape[1], self.position_embedding.num_embeddings
        if positions is None:
            if length > limit:
                raise ValueError(f"a sequence of {length} tokens is longer than the {limit} positions of the model")
            positions = torch.arange(length, device=tokens.device)
        if positions.dim() == 1:
            positions = positions[None]
        embedded: Tensor = self.dropout(self.embedding(tokens) + self.position_embedding(positions))
        return embedded

    def forward(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        """Tokens [b, s] (or hidden state [b, s, h] without embedding) -> logits [b, s, v] (or hidden state).

        `positions` ([s] or [b, s]): places of the tokens in the whole sequence; None: 0, 1, 2 ….
        """
        hidden = inputs if self.embedding is None else self.embed(inputs, positions)
        for block in self.layers.values():
            hidden = block(hidden)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden))
        return hidden
