"""Wrong configurations: each kind gives one problem that names the key, says why, and says what to change."""

from __future__ import annotations

import pytest

from orchestrator.config.compose import examine, load_config
from orchestrator.errors import ConfigError, Problem


def problems_of(*overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    return caught.value.problems


WRONG = [
    # (id, overrides, key, words in the message, words in the fix)
    ("a misspelt key", ["model.hiden_size=64"], "model.hiden_size", "no key `model.hiden_size`", "`model.hidden_size`"),
    ("an alias of the field", ["tp=2"], "tp", "no key `tp`", "`parallel.tensor`"),
    ("an alias below the wrong section", ["training.lr=1"], "training.lr", "no key", "`optimizer.lr`"),
    ("a leaf without its section", ["hidden_size=64"], "hidden_size", "no key", "`model.hidden_size`"),
    ("a key below a value", ["model.hidden_size.x=1"], "model.hidden_size.x", "single value", ""),
    ("a key of gpu below its group", ["gpu.memory_gib=3"], "gpu.memory_gib", "no key", "`cluster.gpu.memory_gib`"),
    ("text for a number", ["training.steps=abc"], "training.steps", "'abc' was given", "Optimizer steps"),
    ("a fraction for a count", ["training.steps=1.5"], "training.steps", "1.5 has a fraction", ""),
    ("true for a number", ["training.steps=true"], "training.steps", "true was given", ""),
    ("zero for a count", ["training.steps=0"], "training.steps", "at least 1", ""),
    ("a negative rate", ["optimizer.lr=-1"], "optimizer.lr", "a number above 0", ""),
    ("infinity", ["optimizer.lr=inf"], "optimizer.lr", "inf was given", ""),
    ("a misspelt word", ["parallel.schedule=1f1"], "parallel.schedule", "'1f1' was given", "`1f1b`"),
    ("a list of the wrong length", ["optimizer.betas=[0.9]"], "optimizer.betas", "a list of 2", ""),
    ("a map for a value", ["training.seed={a: 1}"], "training.seed", "a whole number", ""),
    ("null for a required value", ["model.hidden_size=null"], "model.hidden_size", "null was given", "Width"),
    ("a union in words", ["parallel.data=all"], "parallel.data", "a whole number of at least 1 or `auto`", ""),
    ("an unknown experiment", ["+experiment=lama7b_zero2"], "experiment", "no experiment", "`llama7b_zero2`"),
    ("an unknown option", ["model=lama3_8b"], "model", "no option of the group model", "`llama3_8b`"),
    ("an unknown GPU by key", ["cluster.gpu=a100_80"], "gpu", "no option of the group gpu", "`a100_80gb`"),
    ("an unknown GPU in a node group", ["cluster.node_groups=[{nodes: 1, gpus_per_node: 1, gpu: h20}]"],
     "cluster.node_groups.0.gpu", "no GPU `h20`", "`h200`"),
    ("two experiments", ["+experiment=llama7b_ddp", "experiment=llama3_8b"], "experiment", "Two choices", "Keep one"),
    ("a key given twice", ["training.seed=1", "training.seed=2"], "training.seed", "set twice", "Keep one"),
    ("a key below and then its parent", ["model.rope_scaling.factor=2", "model.rope_scaling=null"],
     "model.rope_scaling", "set twice", "Keep one"),
    ("no equals sign", ["training.steps"], "training.steps", "no `=`", "training.steps=VALUE"),
    ("an experiment without its key", ["llama7b_zero2"], "llama7b_zero2", "no `=`", "+experiment=llama7b_zero2"),
    ("an option without its group", ["zero2"], "zero2", "no `=`", "parallel=zero2"),
    ("a degree of the name of a group", ["data=2"], "data", "no option of the group data", "`parallel.data=2`"),
    ("a group without an option", ["model"], "model", "no `=`", "model=OPTION"),
    ("an empty value", ["training.steps="], "training.steps", "gives no value", "null"),
    ("an empty word", [""], "", "empty word", ""),
    ("no key", ["=3"], "", "no key", ""),
    ("an open bracket", ["data.path=a(b"], "data.path", "cannot be read", "\"data.path='a(b'\""),
    ("a sweep without -m", ["training.seed=1,2"], "training.seed", "several values", "-m"),
    ("a setting of Hydra", ["hydra.run.dir=x"], "hydra.run.dir", "Hydra itself", "run.directory"),
    ("a moved group", ["model@x=llama2_7b"], "model", "moves a group", ""),
    ("a deleted group", ["~model"], "model", "without a choice", "Choose model="),
    ("a group as a map", ["model={a: 1}"], "model", "does not name an option", "model.KEY=VALUE"),
    ("an interpolation to nothing", ["data.path=${nowhere.at}"], "data.path", "nowhere.at", "${oc.env:NAME}"),
    ("an interpolation to itself", ["training.seed=${training.seed}"], "training.seed", "Recursive", ""),
    ("a missing value", ["model.vocab_size=???"], "model.vocab_size", "left open", "model.vocab_size=VALUE"),
    ("a part without its whole", ["model.rope_scaling.factor=8"], "model.rope_scaling.rope_type", "needed", "Give"),
    ("an unknown key of a node group", ["cluster.node_groups=[{nodes: 1, gpus_per_node: 1, gpu: h200, gpus: 2}]"],
     "cluster.node_groups.0.gpus", "no key", ""),
    ("momentum for adamw", ["optimizer.momentum=0.9"], "optimizer.momentum", "belongs to sgd", "optimizer=sgd"),
    ("a decay after the end", ["optimizer.schedule.decay_steps=1000"], "optimizer.schedule.decay_steps",
     "after the last", ""),
    ("the experiment's name by key", ["run.experiment=x"], "run.experiment", "follows from its choice", "+experiment="),
    ("a cluster of GPUs without a kind", ["cluster.device=cuda"], "cluster.gpu", "no kind of GPU is named", "gpu=NAME"),
    ("a GPU in a cluster of CPUs", ["gpu=h200"], "cluster.gpu", "H200-141GB is a GPU", "--help cluster"),
    ("the live cluster", ["cluster=ray"], "cluster", "live Ray cluster", "Declare"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "key", "message", "fix"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG]
)
def test_a_wrong_configuration_names_the_key_the_reason_and_the_change(
    overrides: list[str], key: str, message: str, fix: str
) -> None:
    problems = problems_of(*overrides)
    assert [problem.key for problem in problems] == [key]
    assert message in problems[0].message
    assert fix in problems[0].fix
    assert not [word for word in JARGON if word in str(problems[0])]


JARGON = (
    "function-before",
    "literal[",
    "constrained-int",
    "tagged-union",
    "Input should",
    "validation error",
    "Traceback",
)


def test_one_command_with_many_mistakes_gives_all_of_them() -> None:
    problems = problems_of(
        "+experiment=llama7b_zero2", "model.hiden_size=1", "training.steps=abc", "parallel.schedule=1f1", "lr=3",
        "optimizer.betas=[0.9]", "training.compile=7", "data.path=${a.b}", "foo", "checkpoint.keep_last=0",
        "model.vocab_size=???", "training.seed=-1", "cluster.nodes=none", "fault_tolerance.on_nan=never",
        "data.tokenizer=",
    )  # fmt: skip
    assert [problem.key for problem in problems] == [
        "model.hiden_size", "lr", "foo", "data.tokenizer", "model.vocab_size", "data.path", "cluster.nodes",
        "parallel.schedule", "training.steps", "training.compile", "training.seed", "optimizer.betas",
        "checkpoint.keep_last", "fault_tolerance.on_nan",
    ]  # fmt: skip


@pytest.mark.parametrize("mistake", ["model.hiden_size=1", "training.seed=x", "data.path=${a.b}", "foo"])
def test_what_is_left_without_the_mistake_can_be_examined_further(mistake: str) -> None:
    examined = examine(["+experiment=llama7b_zero2", "parallel.tensor=3", mistake])
    assert examined.config is None
    assert examined.remainder() == load_config(["+experiment=llama7b_zero2", "parallel.tensor=3"])


@pytest.mark.parametrize("mistake", ["model=llma", "+experiment=nope", "cluster.gpu=nope"])
def test_nothing_is_concluded_from_a_group_that_was_not_meant(mistake: str) -> None:
    assert examine([mistake, "parallel.tensor=3"]).remainder() is None
