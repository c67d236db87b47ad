"""The system profiles by name: `ours`, which describes what `engine/` does, and those of published systems.

The product computes for `ours` only; the others exist so that the planner's arithmetic can be judged against published
tables, and no option selects them. What a profile says is `system_profile.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.plan.constants import RESERVE_SHARES
from orchestrator.plan.published_profiles import PUBLISHED
from orchestrator.plan.system_profile import StateBytes, SystemProfile

_GIB = 2**30

_OURS = {
    "fp32": StateBytes(weights=0, master=4, gradients=4, moments=8, gathered=4, raw_gradients=4),
    "bf16_mixed": StateBytes(weights=0, master=4, gradients=4, moments=8, gathered=2, raw_gradients=2),
    "fp16_mixed": StateBytes(weights=0, master=4, gradients=4, moments=8, gathered=2, raw_gradients=2),
    "bf16_pure": StateBytes(weights=0, master=2, gradients=2, moments=4, gathered=2, raw_gradients=2),
}

OURS = SystemProfile(
    name="ours",
    states=_OURS,
    attention="flash",
    master_gathered=True,
    shares_while_accumulating="whole_backwards",
    fused_kernels=False,
    # SDPA's FlashAttention-2; what cuDNN gains on Hopper is left out until it is measured.
    fused_attention=False,
    overlaps_data=True,
    overlaps_tensor=False,
    overlaps_context=False,
    scatters_boundary=False,
    reduces_each_micro_batch=True,
    wire_gradients=None,
    norms="by_device",
    saves_gathered_inputs=True,
    dropout_masks=0,
    keeps_stage_outputs=True,
    logit_bytes=12,
    logits_cut=True,
    receives_ahead=True,
    one_unit_on_cpu=True,
    one_network_card=False,
    # Not yet measured: what torchtitan, the nearest published system, needs.
    reserve_share=RESERVE_SHARES["fsdp"],
    context_bytes=1 * _GIB,
    # Python 3.11 and torch 2.13 with gloo, data and optimizer loaded: resident memory of a quick-start rank less its
    # tensors.
    process_bytes=350 * 10**6,
    calibrated=False,
    source="orchestrator/engine: FSDP2 and replicate over FP32 parameters, fused AdamW, SDPA, loss in chunks",
    loss_in_chunks=True,
    stops_recomputing_early=True,
    casts_block_inputs=True,
)

PROFILES: Mapping[str, SystemProfile] = {OURS.name: OURS, **PUBLISHED}


def profile_named(name: str) -> SystemProfile:
    """The profile of that name.

    Raises:
        KeyError: no such profile; the message lists those that exist.
    """
    try:
        return PROFILES[name]
    except KeyError:
        raise KeyError(f"profile {name!r} does not exist; there are {', '.join(PROFILES)}") from None


__all__ = ["OURS", "PROFILES", "StateBytes", "SystemProfile", "profile_named"]
