"""The real weights of SmolLM2-135M-Instruct: in under several plans, out again, and what transformers computes of both.

Everything goes through what a user types; the ranks' part is one launch for each number of processes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from orchestrator.config.model_folder import model_of
from orchestrator.plan.run_plan import RunPlan
from tests.engine.cases import tiny_plan
from tests.engine.gloo import on_ranks
from tests.engine.huggingface_ranks import Case, loaded_under
from tests.engine.smollm2 import write_smollm2

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5
"""Largest difference of any logit, over the largest logit: FP32, products summed in another order."""
LARGEST_TENSOR_BYTES = 49152 * 576 * 4
PLANS = {"one process": {}, "TP 3": {"parallel__tensor": 3}, "PP 2": {"parallel__pipeline": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_smollm2(tmp_path_factory.mktemp("smollm2") / "hf")


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(49152, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def expected(folder: Path, tokens: Tensor) -> Tensor:
    return logits_of(folder, tokens)


@torch.no_grad()
def logits_of(folder: Path, tokens: Tensor) -> Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits: Tensor = model(tokens, use_cache=False).logits
    return logits


def smollm2_plan(folder: Path, **changes: Any) -> RunPlan:
    sizes = {f"model__{key}": value for key, value in model_of(folder).model_dump().items()}
    return tiny_plan(**sizes, training__sequence_length=24, cluster__gpu={"name": "CPU", "memory_gib": 16}, **changes)


@pytest.mark.parametrize("split", PLANS)
def test_logits_of_the_weights_are_those_of_transformers(
    split: str, folder: Path, tokens: Tensor, expected: Tensor
) -> None:
    plan = smollm2_plan(folder, **PLANS[split])
    ranks = on_ranks(len(plan.ranks), loaded_under, [Case(plan, folder, tokens, gather=False)])
    found = [one.logits for (one,) in ranks if one.logits is not None]
    assert len(found) == (3 if split == "TP 3" else 1)
    for logits in found:
        assert float((logits - expected).abs().max() / expected.abs().max()) <= TOLERANCE
    for (one,) in ranks:
        # Beside the shard, which is there already, blocks of 32 MiB are held, never a tensor.
        assert one.growth_bytes <= 80 << 20


def orchestrator(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "orchestrator", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **options)


MEASURED = """
import resource, sys
import torch, torch.distributed.checkpoint.state_dict_loader, torch.distributed.checkpoint.state_dict_saver
from orchestrator.cli.main import main
import orchestrator.checkpoint.huggingface_import, orchestrator.checkpoint.huggingface_export
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
code = main(sys.argv[1:])
print("grew by", peak() - before)
sys.exit(code)
"""


def growth_of(*words: object) -> int:
    """Run a command in a process of its own; by how much its memory grew beyond the imports."""
    command = [sys.executable, "-c", MEASURED, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def test_import_and_export_give_the_same_bits_and_hold_no_more_than_two_tensors(
    folder: Path, tokens: Tensor, expected: Tensor, tmp_path: Path
) -> None:
    """The whole model is 538 MB, five times its largest tensor."""
    allowed = 2 * LARGEST_TENSOR_BYTES + (64 << 20)
    assert growth_of("checkpoint", "import", folder, tmp_path / "own") <= allowed
    out = tmp_path / "out"
    assert growth_of("checkpoint", "export", tmp_path / "own", out, "--max-shard-size", "200MB") <= allowed
    before = load_file(folder / "model.safetensors")
    after = {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits_of(out, tokens), expected)
    text = "<|im_start|>user\nHow many moons has Mars? 2, 1 or 0?<|im_end|>"
    ids = [AutoTokenizer.from_pretrained(place)(text).input_ids for place in (folder, out)]
    assert ids[0] == ids[1]
    assert ids[0][0] == 1


def test_tensor_parallel_2_is_refused_with_the_heads_that_it_does_not_divide(folder: Path) -> None:
    done = orchestrator(f"model={folder}", f"checkpoint.init_from={folder}", "parallel.tensor=2", "parallel.data=1")
    assert done.returncode == 2
    told = " ".join(done.stderr.split())
    assert "2 does not divide model.num_attention_heads=9" in told
    assert "model.num_key_value_heads=3" in told
    assert f"Set data.tokenizer={folder}" in told, "its own tokenizer is asked for in the same breath"
