"""`SystemProfile`: what a training system keeps, gathers and overlaps; the planner computes for one of them.

Owns the words in which a system is described. Bytes are per parameter element. The profiles themselves are
`profiles.py` (`ours`) and `published_profiles.py`; numbers that were fitted to measurements live in `constants.py`, not
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from orchestrator.plan.schedules import SPLIT_BACKWARDS
from orchestrator.plan.work import Work

Attention = Literal["unfused", "flash"]
"""`unfused`: scores are kept as a matrix; `flash`: they are never stored (Dao et al. 2022)."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes per parameter element of each kind of model state, for one precision."""

    weights: float
    """Weights in compute precision that are kept between steps; shared from ZeRO stage 3 on."""
    master: float
    """Weights that the optimizer updates, where they are not the former; shared from stage 1 on; parameters."""
    gradients: float
    """Gradients as they are accumulated; shared from stage 2 on."""
    moments: float
    """Optimizer state (Adam: two moments); shared from stage 1 on."""
    gathered: float
    """Copies in compute precision made for forward and backward where `weights` is 0, or of shared weights."""
    raw_gradients: float
    """Gradients as the backward pass makes them, before they are reduced."""


@dataclass(frozen=True, slots=True)
class SystemProfile:
    """One training system."""

    name: str
    states: Mapping[str, StateBytes]
    """By precision."""
    attention: Attention
    master_gathered: bool
    """Whether the weights that are kept are the master weights, and compute copies are gathered from them (FSDP)."""
    shares_while_accumulating: Literal["always", "whole_backwards", "without_pipeline", "never"]
    """When ZeRO stages 2 and 3 share gradients and weights between the micro-batches of a step (`whole_backwards`: in
    schedules that do not split a backward pass); otherwise both stay whole until the last one, as in stage 1."""
    fused_kernels: bool
    """Whether elementwise operations are fused (compiled, or written by hand)."""
    fused_attention: bool
    """Whether flash attention is written for the GPU's generation (cuDNN, Transformer Engine)."""
    overlaps_data: bool
    """Whether gathers and reductions of weights and gradients run beside computation."""
    overlaps_tensor: bool
    """Whether tensor-parallel collectives run beside matrix products."""
    overlaps_context: bool
    """Whether context-parallel exchange runs beside attention."""
    scatters_boundary: bool
    """Whether tensor ranks send only their part of the stream to the next stage."""
    reduces_each_micro_batch: bool
    """Whether gradients are reduced after each micro-batch (from stage 2 on) instead of once a step."""
    wire_gradients: float | None
    """Bytes of a gradient element in a reduction; None: as accumulated."""
    norms: Literal["fused", "composite", "by_device"]
    """Whether a norm saves its input only, or two copies in FP32 (torch on a CPU, and everywhere before 2.9)."""
    saves_gathered_inputs: bool
    """Whether products save their input whole under sequence parallelism, instead of gathering it again."""
    dropout_masks: int
    """Dropout masks on the residual stream that a block saves, a byte an element."""
    keeps_stage_outputs: bool
    """Whether a pipeline stage keeps its output beside its activations until the backward pass."""
    logit_bytes: float
    """Bytes a logit of loss and gradient at their largest."""
    logits_cut: bool
    """Whether tensor ranks keep logits and loss cut along the vocabulary."""
    receives_ahead: bool
    """Whether a pipeline stage has a buffer for every micro-batch of the step that it receives, both ways."""
    one_unit_on_cpu: bool
    """Whether replicated weights are gathered and reduced as one unit on a CPU, instead of block by block."""
    one_network_card: bool
    """Whether collectives over nodes use one network card of a node instead of all of them."""
    reserve_share: float
    """Share of all other categories that the allocator needs on top (fragmentation)."""
    context_bytes: int
    """CUDA context, NCCL buffers and library workspaces."""
    process_bytes: int
    """On a CPU, in place of reserve and context: the process itself, interpreter and libraries included."""
    calibrated: bool
    """Whether times and reserve are confirmed by measurements of the system itself."""
    source: str
    stops_recomputing_early: bool = False
    """Whether a block is recomputed only as far as its backward pass needs: not its last product."""
    casts_block_inputs: bool = False
    """Whether every block casts the rotary tables that it is given to the compute type, and keeps them (FSDP2)."""
    loss_in_chunks: bool = False
    """Whether the loss is computed with its gradient in the head's forward pass, a chunk of tokens at a time, in place
    of `logit_bytes` (`loss_chunks.py`)."""

    def fused_norms(self, work: Work) -> bool:
        """Whether a norm saves nothing but its input and output."""
        return self.norms == "fused" or (self.norms == "by_device" and work.on_gpu)

    def zero_stage(self, work: Work) -> int:
        """ZeRO stage that the system really has: stages 2 and 3 come down to 1 where it accumulates without sharing,
        and 1 comes up to 2 where gradients are shared as they come and there is one micro-batch."""
        facts = work.parallel
        if facts.micro_batches == 1:
            return 2 if facts.zero_stage == 1 and self.master_gathered else facts.zero_stage
        shares, pipeline = self.shares_while_accumulating, facts.pipeline > 1
        whole = (
            shares == "never"
            or (shares == "without_pipeline" and pipeline)
            or (shares == "whole_backwards" and pipeline and facts.schedule in SPLIT_BACKWARDS)
        )
        return min(facts.zero_stage, 1) if whole else facts.zero_stage

    def reserve_bytes(self, work: Work, used: float) -> float:
        """What allocator, context and libraries take beside `used` bytes of everything else."""
        return self.context_bytes + self.reserve_share * used if work.on_gpu else float(self.process_bytes)

    def reduced_bytes(self, precision: str) -> float:
        """Bytes of a gradient element in a reduction."""
        return self.bytes_of(precision).gradients if self.wire_gradients is None else self.wire_gradients

    def bytes_of(self, precision: str) -> StateBytes:
        """State bytes of a precision.

        Raises:
            KeyError: the system has no such precision; the message lists those it has.
        """
        try:
            return self.states[precision]
        except KeyError:
            known = ", ".join(self.states)
            raise KeyError(f"profile {self.name!r} has no precision {precision!r}; it has {known}") from None
