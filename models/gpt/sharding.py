"""How the `gpt` family may be cut over tensor ranks, sharding units and pipeline stages: data, no torch.

The words are explained in `models/parameters.py` (`Style`, `ShardingTable`); the engine turns them into torch's own
styles, once for all families.
"""

from __future__ import annotations

from models.parameters import ModelSizes, ShardingTable, Style, unit_groups

EMBEDDING = ("embedding", "position_embedding")
HEAD = ("norm", "head")

STYLES: tuple[tuple[str, Style], ...] = (
    ("embedding", "vocabulary_embedding"),
    ("position_embedding", "scatter_output"),
    ("dropout", "stream_dropout"),
    ("layers.*.attention_norm", "norm"),
    ("layers.*.attention", "gather_input"),
    ("layers.*.attention.q_proj", "colwise"),
    ("layers.*.attention.k_proj", "colwise"),
    ("layers.*.attention.v_proj", "colwise"),
    ("layers.*.attention.core", "head_dropout"),
    ("layers.*.attention.o_proj", "rowwise"),
    ("layers.*.mlp_norm", "norm"),
    ("layers.*.mlp", "gather_input"),
    ("layers.*.mlp.up_proj", "colwise"),
    ("layers.*.mlp.down_proj", "rowwise"),
    ("layers.*.dropout", "stream_dropout"),
    ("norm", "norm"),
    ("head", "vocabulary_head"),
)


def sharding_table(sizes: ModelSizes) -> ShardingTable:
    """The table for these sizes; only tying changes it (embedding and head then belong to one sharding unit)."""
    return ShardingTable(
        styles=STYLES,
        units=unit_groups(EMBEDDING, HEAD, sizes.tie_word_embeddings),
        embedding=EMBEDDING,
        layers="layers",
        head=HEAD,
    )
