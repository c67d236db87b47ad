"""Profiles of published systems, so that the planner's arithmetic can be judged against published tables.

No option selects them; `profiles.py` holds `ours`. Each states what the system's papers, documents or sources say about
states, kernels and overlap; nothing here was fitted except the reserves, which are marked.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.plan.profiles import StateBytes, SystemProfile

_MIXED_16 = StateBytes(weights=2, master=4, gradients=2, moments=8, gathered=2, raw_gradients=2)
_MIXED_32 = StateBytes(weights=2, master=4, gradients=4, moments=8, gathered=2, raw_gradients=2)
_MASTER_ONLY = StateBytes(weights=0, master=4, gradients=4, moments=8, gathered=2, raw_gradients=2)

_MEGATRON = SystemProfile(
    name="megatron",
    states={"fp16_mixed": _MIXED_32, "bf16_mixed": _MIXED_32},
    attention="unfused",
    master_gathered=False,
    full_gradients_under_pipeline=False,
    fused_kernels=True,
    fused_attention=False,
    overlaps_data=False,
    overlaps_tensor=False,
    overlaps_context=True,
    scatters_boundary=True,
    reduces_each_micro_batch=False,
    wire_gradients=2,
    reserve_share=0.0,
    context_bytes=0,
    calibrated=True,
    source="Narayanan et al. 2021, arXiv:2104.04473; Korthikanti et al. 2022, arXiv:2205.05198",
)


def _like(base: SystemProfile, **changes: object) -> SystemProfile:
    from dataclasses import replace

    return replace(base, **changes)  # type: ignore[arg-type]


PUBLISHED: Mapping[str, SystemProfile] = {
    "megatron": _MEGATRON,
    "megatron_deepspeed": _like(_MEGATRON, name="megatron_deepspeed", scatters_boundary=False),
    "deepspeed_zero3": _like(_MEGATRON, name="deepspeed_zero3", overlaps_data=True, reduces_each_micro_batch=True),
    "megatron_core": _like(
        _MEGATRON,
        name="megatron_core",
        attention="flash",
        fused_attention=True,
        overlaps_data=True,
        overlaps_tensor=True,
    ),
    "xla": _like(
        _MEGATRON,
        name="xla",
        attention="flash",
        fused_attention=True,
        overlaps_data=True,
        overlaps_tensor=True,
        reduces_each_micro_batch=True,
        states={"bf16_mixed": _MASTER_ONLY},
        master_gathered=True,
    ),
    "fsdp1": _like(
        _MEGATRON,
        name="fsdp1",
        attention="flash",
        fused_kernels=False,
        overlaps_data=True,
        reduces_each_micro_batch=True,
        states={"bf16_mixed": _MASTER_ONLY},
        master_gathered=True,
        wire_gradients=None,
    ),
    "fsdp2": _like(
        _MEGATRON,
        name="fsdp2",
        attention="flash",
        fused_kernels=False,
        overlaps_data=True,
        reduces_each_micro_batch=True,
        states={"bf16_mixed": _MASTER_ONLY},
        master_gathered=True,
        wire_gradients=None,
    ),
    "fsdp2_compiled": _like(
        _MEGATRON,
        name="fsdp2_compiled",
        attention="flash",
        fused_kernels=True,
        overlaps_data=True,
        reduces_each_micro_batch=True,
        states={"bf16_mixed": _MASTER_ONLY},
        master_gathered=True,
        wire_gradients=None,
    ),
    "fsdp2_async": _like(
        _MEGATRON,
        name="fsdp2_async",
        attention="flash",
        fused_kernels=True,
        overlaps_data=True,
        overlaps_tensor=True,
        reduces_each_micro_batch=True,
        states={"bf16_mixed": _MASTER_ONLY},
        master_gathered=True,
        wire_gradients=None,
    ),
}
