"""`model.*`: the transformer, in the names of Hugging Face's `config.json`."""

from __future__ import annotations

from typing import Literal

from orchestrator.config.schema.base import Count, Fraction, Positive, Section


class RopeScaling(Section):
    """How rotary frequencies are stretched for contexts longer than the model was first trained on."""

    rope_type: Literal["linear", "llama3"]
    """`linear` divides every frequency by `factor`; `llama3` divides only the low ones (LLaMA 3.1)."""
    factor: Positive
    """Factor by which frequencies are divided (no unit)."""
    low_freq_factor: Positive = 1.0
    """`llama3`: wavelengths above original context / this are divided in full (no unit)."""
    high_freq_factor: Positive = 4.0
    """`llama3`: wavelengths below original context / this are left alone (no unit)."""
    original_max_position_embeddings: Count = 8192
    """`llama3`: context that the model was first trained on, in tokens."""


class ModelConfig(Section):
    """Sizes of the model. Nothing here changes with the parallel plan."""

    family: Literal["llama", "gpt"] = "llama"
    """`llama`: RMSNorm, rotary positions, SwiGLU, grouped queries; `gpt`: LayerNorm, learned positions, GELU, bias."""
    hidden_size: Count
    """Width of the residual stream, in features."""
    intermediate_size: Count
    """Width of the feed-forward layer, in features."""
    num_hidden_layers: Count
    """Transformer blocks."""
    num_attention_heads: Count
    """Query heads."""
    num_key_value_heads: Count | None = None
    """Key and value heads; null means as many as query heads, fewer is grouped-query attention."""
    head_dim: Count | None = None
    """Features of one head; null means hidden_size / num_attention_heads."""
    vocab_size: Count
    """Rows of the embedding, in tokens."""
    max_position_embeddings: Count
    """Longest sequence that the model can take, in tokens."""
    rope_theta: Positive = 10000.0
    """Base of the rotary frequencies (no unit)."""
    rope_scaling: RopeScaling | None = None
    """How rotary frequencies are stretched; null leaves them."""
    sliding_window: Count | None = None
    """Tokens that attention looks back, the token itself included; null means all."""
    rms_norm_eps: Positive = 1e-5
    """Added to the variance inside the normalisation (RMSNorm and LayerNorm alike; no unit)."""
    tie_word_embeddings: bool = False
    """Whether the output head is the embedding matrix itself."""
    attention_bias: bool | None = None
    """Whether the query, key, value and output projections have biases; null follows the family (llama no, gpt yes)."""
    attention_output_bias: bool | None = None
    """Whether the attention's output projection has a bias; null follows attention_bias (Qwen2: true and false)."""
    attention_dropout: Fraction = 0.0
    """Share of attention weights dropped in training (0 to 1)."""
    resid_pdrop: Fraction = 0.0
    """Share of features dropped on each residual branch in training (0 to 1)."""
    initializer_range: Positive = 0.02
    """Standard deviation of the initial weights (no unit)."""
