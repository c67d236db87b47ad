"""`parallel.*`: how the training is split. Every value here is a matter of speed and memory, not of what is learned."""

from __future__ import annotations

from typing import Literal

from orchestrator.config.schema.base import Count, Section, Whole

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"]


class ParallelConfig(Section):
    """The parallel plan, as asked."""

    strategy: Literal["manual", "auto"] = "manual"
    """`manual`: the values below; `auto`: the best plan that `search` finds, the values below are then ignored."""
    data: Count | Literal["auto"] = "auto"
    """Data-parallel ranks (copies that see different samples); `auto`: all GPUs that the other degrees leave."""
    tensor: Count = 1
    """GPUs that share each layer's matrices; always inside one node."""
    pipeline: Count = 1
    """Groups of consecutive layers, each on GPUs of its own."""
    context: Count = 1
    """GPUs that share each sequence."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """What data-parallel ranks share, not copy: 0 nothing (DDP), 1 optimizer, 2 also gradients, 3 also parameters."""
    zero_group: Count | Literal["auto"] = "auto"
    """Ranks that share one sharded copy; `auto`: all data x context ranks; fewer is hybrid sharding."""
    offload: Literal["none", "all"] = "none"
    """`all`: parameters, gradients and optimizer state live in host memory."""
    schedule: Schedule = "1f1b"
    """Order in which pipeline stages work on micro-batches."""
    virtual_stages: Count = 1
    """Stages that each pipeline rank holds (interleaved and V-shaped schedules)."""
    stage_layers: tuple[Whole, ...] | Literal["auto"] = "auto"
    """Layers of every virtual stage in order, adding up to the model's; `auto`: balanced by cost."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks also split the sequence between their matrices."""
