"""Single moments of a step that decide what a rank needs: what is there then, counted by hand."""

from __future__ import annotations

from typing import Any

from orchestrator.plan.facts import derive
from orchestrator.plan.make import parallel_facts
from orchestrator.plan.memory import rank_memories
from orchestrator.plan.profiles import OURS
from orchestrator.plan.run_plan import RankMemory
from orchestrator.plan.schedules import Shape
from orchestrator.plan.timeline import crests
from tests.core import plan_cases as cases

STREAM = 4096 * 4096 * 2
"""Bytes of the residual stream of a micro-batch of 4096 tokens."""
TABLES = 2 * 4096 * 64 * 4 * 2
"""Bytes of the rotary tables of two positions of a rotation, cosines and sines."""
MATRIX = 4096 * 11008
BLOCK = 4 * 4096 * 4096 + 3 * MATRIX + 2 * 4096
ENDS = 32000 * 4096


def memory(recompute: str, layers: int = 8, **parallel: Any) -> tuple[RankMemory, ...]:
    config = cases.config(
        {**cases.LLAMA_7B, "num_hidden_layers": layers},
        cluster={"gpu": {**cases.A100_80GB, "memory_gib": 1000}},
        parallel=parallel,
        training={
            "global_batch_size": parallel["data"] * 8,
            "micro_batch_size": 1,
            "activation_checkpointing": recompute,
        },
    )
    return rank_memories(config, parallel_facts(derive(config)), OURS)


def test_a_first_stage_finds_the_embeddings_gradients_in_reduction() -> None:
    """At its first block it holds the buffer of the micro-batch before's last unit: a block's on other stages, smaller
    where the embedding is."""
    tensor = {"data": 2, "tensor": 2, "pipeline": 2, "zero_stage": 3, "sequence_parallel": True}
    rank = memory("selective", layers=4, **tensor)[0]
    received, tables = 8 * STREAM // 2, TABLES // 2
    weights = MATRIX // 2 * 2
    assert rank.buffers_bytes == received + tables + ENDS // 2 * 4 + weights


def test_a_stage_holds_the_gradient_that_it_sent_last() -> None:
    """Two stages of 1F1B in ZeRO-2, at the loss of the last one: one micro-batch's block inputs, the first of them in
    the buffer that it came in; the norm's input and output and the gradient of its result; what was sent."""
    last = memory("full", data=4, pipeline=2, zero_stage=2, schedule="1f1b")[1]
    kept = 4 * (STREAM + TABLES // 4)
    assert last.activations_bytes == kept - STREAM + 3 * STREAM + STREAM
    assert last.logits_bytes is not None and last.logits_bytes > 0


def test_in_gpipe_the_head_keeps_its_norm_of_every_micro_batch_that_waits() -> None:
    """Against 1F1B, where one waits: with eight, seven more when the first gradients come, six when all exist."""
    gpipe, plain = (memory("full", data=4, pipeline=2, zero_stage=3, schedule=name)[1] for name in ("gpipe", "1f1b"))
    more = 6 * (4 * (STREAM + TABLES // 4) - STREAM) + 6 * 2 * STREAM - STREAM
    assert (gpipe.activations_bytes or 0) - (plain.activations_bytes or 0) == more


def test_replicas_give_the_heads_copy_back_before_they_sum_its_gradients() -> None:
    """Several micro-batches, nothing recomputed: the loss is then what needs most, with all gradients whole."""
    (rank,) = memory("none", layers=4, data=8, zero_stage=0)
    assert rank.gradients_bytes == 4 * (4 * BLOCK + 2 * ENDS + 4096)
    assert (rank.logits_bytes or 0) > 0


def test_interleaved_stages_hold_what_they_have_sent_to_the_steps_end() -> None:
    """Later ranks have sent more when they keep most; longer steps send as much more as they are longer."""
    shape = Shape("interleaved_1f1b", 4, 2, 4)
    sent = [crests(shape, rank, (1.0, 1.0))[-1].passed_on for rank in range(4)]
    assert [sum(each) for each in sent] == sorted(sum(each) for each in sent)
    long = Shape("interleaved_1f1b", 4, 2, 64)
    for rank in range(4):
        near, far = (crests(each, rank, (1.0, 1.0)) for each in (long._replace(micro_batches=16), long))
        later = [crest for crest in near if all(crest.begun) and not crest.done]
        assert [crest.passed_on for crest in far if all(crest.begun) and not crest.done] == [
            tuple(count + 48 for count in crest.passed_on) for crest in later
        ]
