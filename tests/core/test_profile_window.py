"""`training.profile_steps` before a rank starts and after it ended: what is refused, what counts for the pace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator import load_config, make_plan
from orchestrator.cli.progress import event_lines
from orchestrator.errors import ConfigError
from orchestrator.tracking.identity import default_name
from orchestrator.tracking.rates import steady_records
from orchestrator.tracking.summary import files_in

QUICK = ["training.steps=100"]


@pytest.mark.parametrize(
    ("window", "says", "fix"),
    [
        ("[12,10]", "begins at step 12 and ends at step 10", "[10,12]"),
        ("[1,21]", "21 steps; a trace holds at most 20", "[1,20]"),
        ("[99,101]", "goes beyond the last step, 100", "[98,100]"),
        ("[500,501]", "goes beyond the last step, 100", "training.steps=501"),
    ],
)
def test_a_window_that_makes_no_trace_is_refused(window: str, says: str, fix: str) -> None:
    problems = make_plan(load_config([*QUICK, f"training.profile_steps={window}"])).problems
    (problem,) = (problem for problem in problems if problem.key == "training.profile_steps")
    assert says in problem.message
    assert fix in problem.fix


@pytest.mark.parametrize("window", ["5", "[0,3]", "[1,2,3]", "[a,b]"])
def test_a_window_of_another_shape_is_refused_with_what_it_means(window: str) -> None:
    with pytest.raises(ConfigError, match=r"First and last step of a profiler window"):
        load_config([f"training.profile_steps={window}"])


@pytest.mark.parametrize(
    ("experiment", "ranks", "says"),
    [
        ("quickstart", "[0,5]", "no rank 5: the plan has 2 ranks"),
        ("quickstart", "[]", "No rank is named"),
        ("llama70b_3d", "all", "128 ranks would each write a trace"),
    ],
)
def test_ranks_that_cannot_be_profiled_are_refused(experiment: str, ranks: str, says: str) -> None:
    words = [f"+experiment={experiment}", "training.profile_steps=[1,2]", f"training.profile_ranks={ranks}"]
    problems = make_plan(load_config(words)).problems
    assert [problem.key for problem in problems] == ["training.profile_ranks"]
    assert says in problems[0].message


@pytest.mark.parametrize("ranks", ["[0]", "[1]", "[0,1]", "all"])
def test_windows_within_the_run_are_taken(ranks: str) -> None:
    words = [*QUICK, "training.profile_steps=[81,100]", f"training.profile_ranks={ranks}"]
    assert make_plan(load_config(words)).problems == ()


def test_a_profiled_run_is_the_same_run() -> None:
    assert default_name(load_config([*QUICK, "training.profile_steps=[3,4]"])) == default_name(load_config(QUICK))


def test_profiled_steps_do_not_count_for_the_pace() -> None:
    def record(step: int, **more: Any) -> dict[str, Any]:
        return {"step": step, "attempt": 1, "step_seconds": 1.0, "tokens": 8, **more}

    records = [record(1), record(2), record(3, profiled=True), record(4)]
    assert [entry["step"] for entry in steady_records(records)] == [2, 4]


def test_the_console_says_where_the_trace_lies_and_what_opens_it() -> None:
    event = {"kind": "profile", "rank": 3, "path": "/r/profile/rank-003.json.gz", "first_step": 10, "last_step": 12}
    (line,) = event_lines(event)
    assert "steps 10 to 12 on rank 3: /r/profile/rank-003.json.gz" in line
    assert "perfetto" in line


def test_the_summary_lists_traces_and_accounts_by_their_place_in_the_run(tmp_path: Path) -> None:
    assert files_in(tmp_path, "profile", "rank-*.json.gz") == []
    (tmp_path / "profile").mkdir()
    for name in ("rank-001.json.gz", "rank-000.json.gz", "rank-000.txt", ".rank-002.partial.json.gz"):
        (tmp_path / "profile" / name).touch()
    assert files_in(tmp_path, "profile", "rank-*.json.gz") == ["profile/rank-000.json.gz", "profile/rank-001.json.gz"]
