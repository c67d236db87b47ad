"""Profiles of published systems, so that the planner's arithmetic can be judged against published tables.

No option selects them; `profiles.py` holds `ours`. Each states what the system's papers, documents or sources say about
states, kernels and overlap; nothing here was fitted except the reserves, which are marked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.plan.constants import RESERVE_SHARES
from orchestrator.plan.system_profile import StateBytes, SystemProfile

_MIXED_32 = StateBytes(weights=2, master=4, gradients=4, moments=8, gathered=2, raw_gradients=0)
_MIXED_16 = StateBytes(weights=2, master=4, gradients=2, moments=8, gathered=2, raw_gradients=0)
_MASTER_ONLY = StateBytes(weights=0, master=4, gradients=4, moments=8, gathered=2, raw_gradients=2)

_MEGATRON = SystemProfile(
    name="megatron",
    states={"fp16_mixed": _MIXED_32, "bf16_mixed": _MIXED_32},
    attention="unfused",
    master_gathered=False,
    shares_while_accumulating="always",
    fused_kernels=True,
    fused_attention=False,
    overlaps_data=False,
    overlaps_tensor=False,
    overlaps_context=True,
    scatters_boundary=True,
    reduces_each_micro_batch=False,
    wire_gradients=2,
    norms="fused",
    saves_gathered_inputs=False,
    dropout_masks=2,
    keeps_stage_outputs=False,
    logit_bytes=8,
    logits_cut=True,
    receives_ahead=False,
    one_unit_on_cpu=False,
    one_network_card=False,
    reserve_share=0.0,
    context_bytes=0,
    process_bytes=0,
    calibrated=True,
    source="Narayanan et al. 2021, arXiv:2104.04473; Korthikanti et al. 2022, arXiv:2205.05198",
)


_PAPER = {
    "bf16_mixed": _MIXED_16,
    "fp16_mixed": _MIXED_16,
    "bf16_pure": StateBytes(weights=2, master=0, gradients=2, moments=4, gathered=2, raw_gradients=0),
    "fp32": StateBytes(weights=4, master=0, gradients=4, moments=8, gathered=4, raw_gradients=0),
}

_ZERO_PAPER = replace(
    _MEGATRON,
    name="zero_paper",
    states=_PAPER,
    overlaps_data=True,
    source="Rajbhandari et al. 2020, arXiv:1910.02054, section 3.1 and table 1 (2 + 2 + 12 bytes a parameter)",
)

_DEEPSPEED = replace(
    _MEGATRON,
    name="megatron_deepspeed",
    states={
        # FP16: half-precision gradients whole; the shard holds master, moments and an FP32 copy of its gradients.
        "fp16_mixed": StateBytes(weights=2, master=4, gradients=2, moments=12, gathered=2, raw_gradients=0),
        # BF16 optimizer: gradients as they come and their FP32 sum, both whole.
        "bf16_mixed": StateBytes(weights=2, master=4, gradients=6, moments=8, gathered=2, raw_gradients=0),
    },
    scatters_boundary=False,
    keeps_stage_outputs=True,
    reserve_share=RESERVE_SHARES["megatron_deepspeed"],
    # Context and communicators, and ZeRO's buckets of 5e8 half-precision elements: two to reduce, one to gather
    # (DeepSpeed's defaults).
    context_bytes=2**30 + 3 * 10**9,
    source="BigScience tr11 chronicles; DeepSpeed fp16 and bf16 optimizers",
)

_FSDP = replace(
    _MEGATRON,
    name="fsdp2",
    states={"bf16_mixed": _MASTER_ONLY},
    attention="flash",
    master_gathered=True,
    shares_while_accumulating="without_pipeline",
    fused_kernels=False,
    overlaps_data=True,
    reduces_each_micro_batch=True,
    wire_gradients=None,
    norms="composite",
    saves_gathered_inputs=True,
    dropout_masks=0,
    keeps_stage_outputs=True,
    receives_ahead=True,
    logit_bytes=12,
    reserve_share=RESERVE_SHARES["fsdp"],
    source="torchtitan, benchmarks/ and its paper (arXiv:2410.06511)",
)

_COMPILED = replace(_FSDP, name="fsdp2_compiled", fused_kernels=True, norms="fused")

_CORE = replace(
    _MEGATRON,
    name="megatron_core",
    # Gradients stay in BF16 (grad_reduce_in_fp32=False in the performance recipes).
    states={"fp16_mixed": _MIXED_16, "bf16_mixed": _MIXED_16},
    attention="flash",
    fused_attention=True,
    overlaps_data=True,
    overlaps_tensor=True,
    dropout_masks=0,
    source="Megatron-Core and NeMo performance guides: distributed optimizer, overlapped reductions and TP",
)

PUBLISHED: Mapping[str, SystemProfile] = {
    profile.name: profile
    for profile in (
        _ZERO_PAPER,
        replace(
            _ZERO_PAPER,
            name="deepspeed_estimator",
            states={
                # Half-precision gradients whole beside an FP32 copy in the shard.
                "fp16_mixed": StateBytes(weights=2, master=4, gradients=4, moments=8, gathered=2, raw_gradients=2)
            },
            source="DeepSpeed, docs/code-docs/source/memory.rst: 4P + 16P/N in stage 2, 18P/N + 4 x largest in stage 3",
        ),
        _MEGATRON,
        _DEEPSPEED,
        replace(
            _DEEPSPEED,
            name="deepspeed_zero3",
            overlaps_data=True,
            reduces_each_micro_batch=True,
            one_network_card=True,
            keeps_stage_outputs=False,
        ),
        _CORE,
        replace(
            _CORE,
            name="xla_fsdp",
            states={"bf16_mixed": _MASTER_ONLY},
            master_gathered=True,
            reduces_each_micro_batch=True,
            source="MaxText and Paxml",
        ),
        replace(
            _COMPILED,
            name="llama3",
            reserve_share=0.0,
            # Inputs and outputs of stages are freed as soon as they are not needed.
            keeps_stage_outputs=False,
            receives_ahead=False,
            overlaps_context=False,
            source="Grattafiori et al. 2024, arXiv:2407.21783, section 3.3: no resharding, no overlap of TP and CP",
        ),
        replace(
            _FSDP,
            name="fsdp1",
            norms="fused",
            logit_bytes=4,
            reserve_share=0.0,
            source="llm-foundry: FSDP, low-precision LayerNorm, fused cross-entropy",
        ),
        replace(
            _FSDP,
            name="fms_fsdp",
            reserve_share=0.0,
            wire_gradients=2,
            source="fms-fsdp: FSDP with gradients reduced in BF16 (its bfSixteen policy)",
        ),
        _FSDP,
        _COMPILED,
        replace(_COMPILED, name="fsdp2_async", overlaps_tensor=True),
        replace(
            _COMPILED,
            name="kempner_forge",
            states={"bf16_mixed": StateBytes(weights=0, master=2, gradients=2, moments=4, gathered=2, raw_gradients=2)},
            shares_while_accumulating="never",
            logits_cut=False,
            logit_bytes=6,
            reserve_share=0.0,
            source="KempnerForge benchmarks: BF16 weights and states, accumulation without reduction",
        ),
    )
}
