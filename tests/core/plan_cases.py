"""Configurations for the planner's tests, built in memory: real models, real GPUs, one place to vary them."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

from orchestrator.config.schema import RunConfig

A100_80GB = {
    "name": "A100-80GB",
    "memory_gib": 79.2,
    "memory_bandwidth_gb_per_s": 2039,
    "peak_tflops": {"fp32": 19.5, "bf16": 312, "fp16": 312},
    "nvlink_gb_per_s": 300,
    "pcie_gb_per_s": 31,
    "price_per_hour": 2.0,
}
A100_40GB = {**A100_80GB, "name": "A100-40GB", "memory_gib": 39.4, "memory_bandwidth_gb_per_s": 1555}
V100_32GB = {
    "name": "V100-32GB",
    "memory_gib": 31.7,
    "memory_bandwidth_gb_per_s": 900,
    "peak_tflops": {"fp32": 15.7, "fp16": 125},
    "nvlink_gb_per_s": 150,
    "pcie_gb_per_s": 16,
}
H100_80GB = {
    **A100_80GB,
    "name": "H100-80GB",
    "memory_gib": 79.1,
    "memory_bandwidth_gb_per_s": 3350,
    "peak_tflops": {"fp32": 67, "bf16": 989.4, "fp16": 989.4},
    "nvlink_gb_per_s": 450,
    "pcie_gb_per_s": 63,
}

LLAMA_7B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
LLAMA2_70B: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


def config(
    model: dict[str, Any] = TINY,
    *,
    model_changes: dict[str, Any] | None = None,
    cluster: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
) -> RunConfig:
    """A whole configuration: `model` on one node of 8 A100-80GB unless told otherwise."""
    declared_cluster = {"nodes": 1, "gpus_per_node": 8, "gpu": A100_80GB, "network_gbps_per_gpu": 200}
    declared_training = {
        "sequence_length": model["max_position_embeddings"],
        "global_batch_size": 64,
        "steps": 100,
        "activation_checkpointing": "full",
    }
    return RunConfig.model_validate(
        {
            "model": {**model, **(model_changes or {})},
            "cluster": {**declared_cluster, **(cluster or {})},
            "parallel": parallel or {},
            "training": {**declared_training, **(training or {})},
            "optimizer": optimizer or {},
        }
    )


def examples(count: int) -> settings:
    """Hypothesis settings of the planner's tests: the same examples on every run, no limit on the time of one."""
    return settings(max_examples=count, derandomize=True)
