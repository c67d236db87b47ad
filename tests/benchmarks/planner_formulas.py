"""Analytic rows of published tables: parameters, ZeRO's tables, DeepSpeed's estimator, activations, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from models.spec import parameter_count
from orchestrator.config.schema import ModelConfig
from orchestrator.plan.activations import block_activations
from orchestrator.plan.architecture import Weight
from orchestrator.plan.memory import kept_activations
from orchestrator.plan.profiles import profile_named
from orchestrator.plan.states import StageElements, held_stages, state_memory
from orchestrator.plan.system_profile import StateBytes
from orchestrator.plan.work import Recompute, Work
from tests.benchmarks.planner_rows import Inexpressible, Row, build_architecture, number, read_rows, work_of_row

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Check:
    """One published figure beside the planner's."""

    row_id: str
    kind: str
    published: float
    predicted: float
    unit: str
    matches: bool
    """Within what the figure's rounding allows (or 0.1 GiB, for activations)."""

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.published - 1.0


def parameter_checks(directory: Path) -> tuple[list[Check], list[tuple[str, str]]]:
    """Exact counts of `param_counts.csv`."""

    def check(row: Row) -> Check:
        published = int(row["exact_params"] or row["formula_params"])
        predicted = _parameters(row)
        return Check(row["row_id"], "parameters", published, predicted, "", predicted == published)

    return _checked(directory, "param_counts.csv", check)


def _parameters(row: Row) -> int:
    layers, hidden, heads = number(row, "layers"), number(row, "hidden"), number(row, "heads")
    shared, ffn, vocab = number(row, "kv_heads", heads), number(row, "ffn"), number(row, "vocab")
    positions, tied = number(row, "pos_emb_rows", 0), row["tied_emb"] == "1"
    if row["family"] in ("llama", "gpt", "mpt-bench"):
        # Families of the product: counted from its own parameter specifications.
        sizes = ModelConfig(
            family="llama" if row["family"] == "llama" else "gpt",
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=shared,
            vocab_size=vocab,
            max_position_embeddings=positions or 2048,
            tie_word_embeddings=tied,
        )
        return parameter_count(sizes)
    if row["family"] not in ("bloom", "neox"):
        raise Inexpressible(f"family {row['family']} is not known")
    architecture = build_architecture(
        layers, hidden, heads, shared, hidden // heads, ffn, vocab, row["gated_mlp"] == "1", tied, positions
    )
    if row["family"] == "bloom":
        norm = (Weight((hidden,)), Weight((hidden,)))
        architecture = replace(architecture, embedding=(*architecture.embedding, *norm))
    return architecture.parameters


def table_checks(directory: Path) -> tuple[list[Check], list[tuple[str, str]]]:
    """Every expressible figure of `mem_tables.csv`."""
    dimensions = {row["model"]: row for row in read_rows(directory, "perf_megatron.csv")}

    def check(row: Row) -> Check:
        kind = row["kind"]
        if kind == "zero_table1":
            return _rounded(row, _states_gb(row))
        if kind == "zero_table2_max_model":
            return _largest_model(row)
        if kind == "deepspeed_estimator":
            return _rounded(row, _estimator(row))
        if kind.startswith("act_2205"):
            return _activation(row, dimensions)
        if kind == "checkpoint_size":
            state = profile_named("megatron").bytes_of("bf16_mixed")
            size = float(row["params"]) * (state.weights + state.master + state.moments) / _GIB
            return Check(
                row["row_id"], kind, float(row["value"]), size, "GiB", abs(size / float(row["value"]) - 1) < 0.02
            )
        raise Inexpressible(f"kind {kind} is not known")

    return _checked(directory, "mem_tables.csv", check)


def _checked(directory: Path, name: str, check: Callable[[Row], Check]) -> tuple[list[Check], list[tuple[str, str]]]:
    checks, unexpressed = [], []
    for row in read_rows(directory, name):
        try:
            checks.append(check(row))
        except (Inexpressible, KeyError, ValueError) as error:
            unexpressed.append((row["row_id"], str(error)))
    return checks, unexpressed


def _rounded(row: Row, predicted: float) -> Check:
    """A figure that agrees within one unit of its last printed digit (the papers round and truncate)."""
    text = row["value"]
    unit = 10.0 ** -len(text.partition(".")[2])
    agrees = abs(predicted - float(text)) <= unit * 1.0001
    return Check(row["row_id"], row["kind"], float(text), predicted, row["unit"], agrees)


def _states(elements: StageElements, state: StateBytes, stage: int, ranks: int, offload: bool = False) -> float:
    memory = state_memory(elements, state, zero_stage=stage, master_gathered=False, offload=offload)
    return float(memory.persistent + memory.transient_gradients)


def _states_gb(row: Row) -> float:
    """Table 1 of the ZeRO paper: model states of one GPU."""
    whole, ranks = number(row, "params"), number(row, "dp")
    elements = StageElements(whole=whole, shared=-(-whole // ranks), block=0, ends=0)
    state = profile_named("zero_paper").bytes_of("fp16_mixed")
    return _states(elements, state, number(row, "stage"), ranks) / 1e9


def _largest_model(row: Row) -> Check:
    """Table 2 of the ZeRO paper: parameters whose states fill 32 GB."""
    if row["quantity"] != "max_params_theoretical":
        raise Inexpressible("the measured model's sizes and batch are not stated")
    ranks, million = number(row, "dp"), 10**6 * number(row, "dp")
    elements = StageElements(whole=million, shared=million // ranks, block=0, ends=0)
    state = profile_named("zero_paper").bytes_of("fp16_mixed")
    each = _states(elements, state, number(row, "stage"), ranks) / million
    return _rounded(row, 32e9 / each * number(row, "mp") / 1e9)


def _estimator(row: Row) -> float:
    """What DeepSpeed's estimator prints for one GPU, in GiB or MiB."""
    option, quantity = row["option"], row["quantity"]
    case = quantity.partition("_")[0] if quantity.startswith("case") else ""
    if "cpu_total" in quantity:
        raise Inexpressible("host memory while a model is initialised is not planned")
    if option in ("offload_optimizer=cpu", "(none,cpu,0)") or "(none,cpu" in option or case == "case3":
        raise Inexpressible("offloading the optimizer alone is not planned")
    offload = "(cpu,cpu" in option or case == "case2"
    largest = _largest_layer(row) if number(row, "stage") == 3 else 0
    whole, ranks = number(row, "params"), number(row, "dp")
    elements = StageElements(whole=whole, shared=-(-whole // ranks), block=largest, ends=0)
    state = profile_named("deepspeed_estimator").bytes_of("fp16_mixed")
    memory = state_memory(
        elements,
        state,
        zero_stage=number(row, "stage"),
        master_gathered=False,
        offload=offload,
    )
    # The estimator counts one gathered layer where the planner has the next one as well.
    total = memory.persistent + memory.transient_gradients + memory.gathered / 2
    return total / (2**20 if row["unit"] == "MiB" else _GIB)


def _largest_layer(row: Row) -> int:
    for word in row["notes"].replace(",", " ").split():
        if word.endswith("M") and word[:-1].replace(".", "").isdigit():
            return round(float(word[:-1]) * 1e6)
        if word.isdigit() and int(word) >= 10**6:
            return int(word)
    raise Inexpressible("the largest layer is not stated")


_OPTIONS: tuple[tuple[str, Recompute, bool], ...] = (
    ("SP + selective", "attention", True),
    ("baseline", "none", False),
    ("sequence parallel", "none", True),
    ("selective", "attention", False),
    ("full", "full", False),
)


def _activation(row: Row, dimensions: dict[str, dict[str, str]]) -> Check:
    """Figures 1 and 7 of Korthikanti et al. 2022, which are their formulas."""
    if row["quantity"] == "param_plus_optimizer":
        whole = number(row, "params") // number(row, "mp")
        elements = StageElements(whole=whole, shared=whole, block=0, ends=0)
        state = profile_named("megatron").bytes_of("fp16_mixed")
        return _near(row, _states(elements, state, 0, 1) / _GIB)
    if row["model"] not in dimensions:
        raise Inexpressible(f"sizes of {row['model']} are in no table of this folder")
    recompute, sequence_parallel = next(
        (recompute, split) for word, recompute, split in _OPTIONS if word in row["option"]
    )
    profile = profile_named("megatron")
    plain = replace(work_of_row(dimensions[row["model"]]), recompute="none", sequence_parallel=False)
    work = replace(plain, recompute=recompute, sequence_parallel=sequence_parallel)
    if row["quantity"] == "activation_pct_of_baseline":
        kept, base = block_activations(work, profile).kept, block_activations(plain, profile).kept
        return _near(row, 100.0 * kept / base)
    work = _interleaved(work)
    return _near(
        row,
        kept_activations(work, profile, block_activations(work, profile), held_stages(work.parallel)[0], 0) / _GIB,
    )


def _interleaved(work: Work) -> Work:
    """The figure's schedule, interleaved over three stages a rank."""
    facts, layers = work.parallel, work.architecture.layers
    stages = facts.pipeline * 3
    cut = tuple((layers * stage // stages, layers * (stage + 1) // stages) for stage in range(stages))
    changed = replace(facts, schedule="interleaved_1f1b", virtual_stages=3, stage_layers=cut)
    return replace(work, parallel=changed)


def _near(row: Row, predicted: float) -> Check:
    agrees = abs(predicted - float(row["value"])) <= (0.25 if row["unit"] == "%" else 0.1)
    return Check(row["row_id"], row["kind"], float(row["value"]), predicted, row["unit"], agrees)
