"""Whatever is typed: a configuration or problems, never another exception."""

from __future__ import annotations

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.cli import invocation
from orchestrator.config import keys, locate
from orchestrator.config.compose import examine
from orchestrator.config.schema import RunConfig
from orchestrator.plan.make import make_plan

SECTIONS = [name for name, key in keys.all_keys().items() if key.is_section and "*" not in name]
TRAPS = [
    "null", "true", "auto", "[]", "{}", "[1,2]", "{a: 1}", "1,2", "???", "${a}", "${training.seed}", "${oc.env:NO}",
    "${", "$", "nan", "-inf", "'x'", "range(3)", "glob(*)", "choice(1,2)", "int(x)", "1e400", "0x10", "1_000", "''",
    "${this_machine_memory_gib:0}", "${oc.create:{a: 1}}", "[{nodes: 1}]", "[{gpu: h200}]", "[1, [2, {a: null}]]",
]  # fmt: skip
VALUES = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="0123456789.eE+-_", max_size=8),
    st.text(alphabet="[]{}(),:='\"$\\ ab1.~@", max_size=12),
    st.integers(-3, 10**20).map(str),
    st.floats().map(str),
    st.sampled_from(TRAPS),
)
NAMES = st.one_of(
    st.sampled_from([*keys.leaf_names(), *SECTIONS, *locate.GROUPS]),
    st.sampled_from(keys.leaf_names()).flatmap(lambda name: st.text(max_size=3).map(lambda more: name + more)),
    st.sampled_from(
        ["cluster.node_groups.0.nodes", "cluster.node_groups.1.gpu", "optimizer.betas.0", "tracking.tags.a", "hydra.x"]
    ),
    st.text(max_size=8),
)
OVERRIDES = st.one_of(
    st.text(max_size=16),
    st.builds(
        lambda start, name, equals, value: f"{start}{name}{equals}{value}",
        st.sampled_from(["", "", "", "", "+", "++", "~"]), NAMES,
        st.sampled_from(["=", "=", "=", "=", "", "==", "@"]), VALUES,
    ),
)  # fmt: skip


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(OVERRIDES, max_size=5))
def test_any_words_give_a_configuration_or_problems(words: list[str]) -> None:
    examined = examine(words)
    if examined.config is None:
        assert examined.problems
        assert all(problem.message.strip() for problem in examined.problems)
        rest = examined.remainder()
        assert rest is None or isinstance(rest, RunConfig)
    else:
        assert not examined.problems
        assert json.loads(json.dumps(make_plan(examined.config).to_dict()))


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(OVERRIDES, st.sampled_from(["-m", "--cfg", "--help", "--json", "-", "--", "plan", "--config-dir"]))
    )
)
def test_any_command_line_can_be_taken_apart(words: list[str]) -> None:
    made = invocation.parse(words)
    assert made.command
    assert len(made.overrides) <= len(words)
