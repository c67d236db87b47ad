"""The `llama` decoder for one device: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Owns the computation; takes no degree, rank or group, and no initial values: it is built on the meta device, allocated
(`to_empty`) and filled by whoever runs it, from the specs in `parameters.py`. What may be cut where: `sharding.py`.

Shapes: b batch, s sequence, h hidden size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.layers.attention import Attention
from models.layers.rotary import RotaryTables, Tables
from models.llama.parameters import DEFAULT_ATTENTION_BIAS
from models.parameters import ModelSizes


class LlamaMlp(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


class LlamaBlock(nn.Module):
    """One block: two residual branches, each behind its RMSNorm (computed in FP32 whatever the input is)."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.attention = Attention(sizes, default_bias=DEFAULT_ATTENTION_BIAS)
        self.mlp_norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.mlp = LlamaMlp(sizes)
        self.dropout = nn.Dropout(sizes.resid_pdrop) if sizes.resid_pdrop else nn.Identity()

    def forward(self, hidden: Tensor, rotary: Tables) -> Tensor:
        """[b, s, h] -> [b, s, h]."""
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), rotary=rotary))
        output: Tensor = hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))
        return output


class LlamaModel(nn.Module):
    """A whole model, or the part of it that one pipeline stage holds.

    Args:
        sizes: the whole model's sizes.
        layers: global indices of the blocks held here; None: all.
        embedding: whether the token table is held; without it the input is the hidden state of the stage before.
        head: whether final norm and output head are held; without them the output is the hidden state.
        sequence_length: longest sequence that rotary tables are kept for; None: `max_position_embeddings`.
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
        with torch.device("meta"):
            self.embedding = nn.Embedding(sizes.vocab_size, sizes.hidden_size) if embedding else None
            # A dict keyed by the global index, not a list: a stage that holds blocks 8 to 15 keeps their names.
            self.layers = nn.ModuleDict({str(layer): LlamaBlock(sizes) for layer in held})
            self.norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps) if head else None
            self.head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False) if head else None
            self.rotary = RotaryTables(sizes, sequence_length or sizes.max_position_embeddings)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the head's weight the embedding's, if the model is tied and both are here.

        Whatever replaces parameters (tensor parallelism, `to_empty`) unties them: call it again afterwards.
        """
        if self.tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def initialise_buffers(self) -> None:
        """Compute the rotary tables and tie the head; needed once after every `to_empty`, which does neither."""
        self.rotary.fill()
        self.tie_weights()

    def forward(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        """Tokens [b, s] (or hidden state [b, s, h] without embedding) -> logits [b, s, v] (or hidden state).

        `positions` ([s] or [b, s]): places of the tokens in the whole sequence; None: 0, 1, 2 ….
        """
        hidden = inputs if self.embedding is None else self.embedding(inputs)
        rotary = self.rotary(positions)
        for block in self.layers.values():
            hidden = block(hidden, rotary)
        if self.norm is not None and self.head is not None:
            hidden = self.head(self.norm(hidden))
        return hidden
