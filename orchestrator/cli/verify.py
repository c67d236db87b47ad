"""`verify`: a plan, made small, trains on CPU processes of this machine and is held against plain torch on one.

The work is `engine/verify.py`'s; here the plan is judged, and what was reduced and how far the two are apart is
printed. Exit 0 when they agree, 2 when the plan is refused, 3 when they differ or a rank fails. No Ray.
"""

from __future__ import annotations

import json
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from orchestrator.cli.invocation import Invocation
from orchestrator.cli.preflight import plan_of
from orchestrator.cli.show import terminal_width
from orchestrator.errors import ConfigError, OrchestratorError, PlanError, Problem
from orchestrator.plan.engine_rules import engine_problems
from orchestrator.plan.run_plan import RunPlan

if TYPE_CHECKING:
    from orchestrator.engine.verify import Verified
    from orchestrator.engine.verify_compare import Outcome
    from orchestrator.plan.reduce import Reduction

HELP = """\
python -m orchestrator verify [+experiment=NAME] [GROUP=OPTION ...] [KEY=VALUE ...] [--json]

Proves on this machine's CPU that the plan is the same training as one process: the plan, reduced to at most 8 processes
and toy widths, trains a few steps with the engine's own code; so does plain torch on one process. Compared are the loss
of every step, every gradient, the gradient norm on every rank and the weights after the last step, in FP64 and in the
plan's own precision; the largest difference of each is printed with the parameter's name. Degrees above 1 stay above 1;
a plan with more split axes than 8 processes hold is verified in several reductions. About a minute on two cores.
Exit code 0: they agree; 2: the plan or the configuration is refused; 3: they differ, or a rank failed.

  python -m orchestrator verify +experiment=llama70b_3d
  python -m orchestrator verify +experiment=llama7b_zero2 parallel.zero_stage=3 parallel.zero_group=4
"""

FLAGS = ("--json",)
DIFFER = 3
_SCHEMA_VERSION = 1


def run(invocation: Invocation) -> int:
    """Verify and print. Raises ConfigError or PlanError when there is nothing to verify, RunError when a rank fails."""
    try:
        plan = _runnable(plan_of(invocation))
        return _verify(plan, as_json=invocation.json)
    except OrchestratorError as error:
        if invocation.json:
            _print_json(_failed(error))
        raise


def _runnable(plan: RunPlan) -> RunPlan:
    """The plan, which planner and engine accept. Raises PlanError with every problem."""
    problems: tuple[Problem, ...] = plan.problems or engine_problems(plan)
    if problems:
        raise PlanError(problems)
    return plan


def _verify(plan: RunPlan, *, as_json: bool) -> int:
    from orchestrator.engine.verify_processes import warm_up

    warm_up()  # the ranks' server imports torch while this process does
    from orchestrator.engine.verify import to_dict, verify
    from orchestrator.plan.reduce import reductions

    count = len(reductions(plan))
    if not as_json:
        _say(_opening(plan, count))
    found: list[Verified] = []
    for one in verify(plan):
        found.append(one)
        if not as_json:
            _say(reduction_text(one, number=len(found), count=count))
    agree = all(one.agrees for one in found)
    if as_json:
        _print_json(to_dict(plan, found))
    else:
        _say(_closing(agree))
    return 0 if agree else DIFFER


def _opening(plan: RunPlan, count: int) -> str:
    from orchestrator.engine.verify_reference import DESCRIPTION

    parallel, config = plan.parallel, plan.config
    assert parallel is not None
    degrees = {name: getattr(parallel, name) for name in ("tensor", "pipeline", "data") if getattr(parallel, name) > 1}
    split = " x ".join(f"{name} {size}" for name, size in degrees.items()) or "one process"
    ranks = "1 rank" if parallel.world_size == 1 else f"{parallel.world_size} ranks"
    several = (
        "" if count == 1 else f" Its axes need more than 8 processes together, so {count} reductions are verified."
    )
    return "\n".join(
        [
            *_paragraph(f"{config.run.experiment}: {ranks} ({split}).{several}"),
            *_paragraph(f"Reference: {DESCRIPTION}."),
        ]
    )


def reduction_text(one: Verified, *, number: int, count: int) -> str:
    """Everything about one reduction: what was kept, what was reduced, how far it is from the reference."""
    reduction = one.reduction
    processes = reduction.axes.world_size
    split = "" if processes == 1 else f" ({reduction.axes.describe()})"
    lines = ["", f"Reduction {number} of {count}: {processes} CPU process{'es' if processes > 1 else ''}{split}"]
    changes = ", ".join(
        f"{change.key} {_shown(change.asked)} -> {_shown(change.reduced)}" for change in reduction.changes
    )
    lines += _paragraph(f"kept: {_kept(reduction)}", "  ")
    lines += _paragraph(f"reduced: {changes or 'nothing'}", "  ")
    for outcome in one.outcomes:
        lines += _outcome_lines(outcome)
    return "\n".join(lines)


def _kept(reduction: Reduction) -> str:
    config, parallel = reduction.plan.config, reduction.plan.parallel
    assert parallel is not None
    training, model = config.training, config.model
    said = [
        model.family,
        f"ZeRO-{parallel.zero_stage}"
        + (f" in groups of {parallel.zero_group}" if parallel.replicate > 1 < parallel.zero_group else ""),
        f"offload={config.parallel.offload}" if config.parallel.offload != "none" else "",
        f"{parallel.schedule}, stages of {[end - first for first, end in parallel.stage_layers]} layers"
        if parallel.pipeline > 1
        else "",
        "sequence parallel" if config.parallel.sequence_parallel and parallel.tensor > 1 else "",
        f"{parallel.micro_batches} micro-batches of {training.micro_batch_size}",
        f"{training.activation_checkpointing} recomputation" if training.activation_checkpointing != "none" else "",
        "tied embeddings" if model.tie_word_embeddings else "",
        f"{model.num_attention_heads} heads over {model.num_key_value_heads or model.num_attention_heads}",
    ]
    return ", ".join(word for word in said if word)


def _outcome_lines(outcome: Outcome) -> list[str]:
    clipped = "" if outcome.clipped is None else f", clipped in {outcome.clipped} steps"
    empty = ", one data rank without a valid token in some steps" if outcome.empty else ""
    lines = _paragraph(
        f"{outcome.title}: loss {outcome.losses[0]:.4f} to {outcome.losses[1]:.4f}{clipped}, ragged sequences{empty}",
        "  ",
    )
    for difference in outcome.differences:
        size = f"{difference.value:>9.1e}  (limit {difference.limit:g})"
        verdict = "" if difference.agrees else "   DIFFERS"
        lines.append(f"    {difference.what:<14}{size:<25}{difference.where}{verdict}")
    return lines + [line for text in outcome.broken for line in _paragraph(f"DIFFERS: {text}", "    ")]


def _closing(agree: bool) -> str:
    if agree:
        return "\nThe plan and one process do the same training."
    return "\nThe plan and one process do NOT do the same training: see DIFFERS above."


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list) and len(value) > 8:
        return f"[{', '.join(map(str, value[:3]))}, ... {value[-1]}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _paragraph(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, terminal_width(), initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )


def _say(text: str) -> None:
    print(text, flush=True)


def _failed(error: OrchestratorError) -> dict[str, Any]:
    """The shape of `--json` when there is nothing to compare: the problems, and null or nothing for the rest."""
    return {
        "schema_version": _SCHEMA_VERSION,
        "agrees": None if isinstance(error, ConfigError | PlanError) else False,
        "reference": None,
        "experiment": None,
        "problems": [problem.to_dict() for problem in error.problems],
        "reductions": [],
    }


def _print_json(values: dict[str, Any]) -> None:
    json.dump(values, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")
    sys.stdout.flush()
