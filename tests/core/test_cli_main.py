"""The commands from outside: exit codes, what goes to stdout and what to stderr, what is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli import checkpoint, commands
from orchestrator.cli.main import main
from orchestrator.config import locate
from orchestrator.errors import RunError

ROOT = Path(__file__).resolve().parents[2]


class Said:
    """What a command line gave."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]):
    def run(*words: str) -> Said:
        code = main(words)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Said(code, captured.out, captured.err)

    return run


def test_plan_prints_the_json_contract(say) -> None:
    said = say("plan", "+experiment=llama7b_zero2", "--json")
    plan = json.loads(said.out)
    assert said.code == 0
    assert said.err == ""
    assert plan["schema_version"] == 1
    assert plan["feasible"] is True
    assert plan["config"]["run"]["experiment"] == "llama7b_zero2"
    assert plan["model"]["parameters"] == 6_738_415_616
    assert plan["parallel"]["world_size"] == len(plan["ranks"]) == 8


def test_an_infeasible_plan_is_printed_with_its_problems_and_exit_code_2(say) -> None:
    said = say("plan", "+experiment=llama7b_zero2", "parallel.tensor=3", "--json")
    plan = json.loads(said.out)
    assert said.code == 2
    assert plan["feasible"] is False
    assert {problem["key"] for problem in plan["problems"]} == {"parallel.tensor"}
    assert "parallel.tensor: 3 does not divide" in said.err


def test_the_page_of_a_refused_plan_shows_its_problems_and_nothing_repeats_them(say) -> None:
    said = say("plan", "+experiment=llama7b_zero2", "parallel.tensor=3")
    assert said.code == 2
    assert "3 does not divide" in said.out
    assert said.err == ""


def test_a_refused_configuration_has_the_shape_of_the_contract_too(say) -> None:
    right = json.loads(say("plan", "--json").out)
    said = say("plan", "model.hiden_size=1", "training.seed=x", "parallel.tensor=5", "--json")
    wrong = json.loads(said.out)
    assert said.code == 2
    assert list(wrong) == list(right)
    assert [problem["key"] for problem in wrong["problems"]][:2] == ["model.hiden_size", "training.seed"]
    assert "parallel.tensor" in {problem["key"] for problem in wrong["problems"]}
    assert {name: set(wrong[name]) for name in ("time", "traffic", "cost")} == {
        name: set(right[name]) for name in ("time", "traffic", "cost")
    }


@pytest.mark.parametrize("words", [["plan"], ["search"], ["dryrun"], ["plan", "--cfg", "job"], ["plan", "--json"]])
def test_a_name_that_no_run_can_have_is_refused_by_every_command(say, words: list[str]) -> None:
    said = say(*words, f"run.name={'x' * 300}")
    assert said.code == 2
    assert "it has 300 bytes" in " ".join((said.out + said.err).split())


def test_plan_for_people_names_the_memory_and_the_ranks(say) -> None:
    said = say("plan", "+experiment=llama70b_3d")
    assert said.code == 0
    assert "68.98 billion parameters" in said.out
    assert "A100-80GB" in said.out


def test_what_the_engine_cannot_run_yet_is_a_note_of_the_plan(say) -> None:
    plan = json.loads(say("plan", "+experiment=llama70b_3d", "--json").out)
    told = [warning for warning in plan["warnings"] if warning.startswith("`train` refuses this plan: ")]
    from orchestrator.plan.engine_rules import LIMITS

    assert all(any(warning.partition(": ")[2].startswith(limit.key) for limit in LIMITS) for warning in told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["pln"], "Did you mean `plan`?"),
        (["trayn", "a=1"], "Did you mean `train`?"),
        (["llama7b_zero2"], "+experiment=llama7b_zero2"),
        (["llama7b_zer02"], "+experiment=llama7b_zero2"),
        (["xyzzy"], "The commands are"),
        (["plan", "--jsn"], "`--json`"),
        (["plan", "-m"], "It belongs to: train"),
        (["train", "--json"], "It belongs to: plan"),
        (["--help", "paralelx"], "`parallel`"),
        (["--help", "model=llma"], "`llama_7b`"),
        (["help", "xyzzy"], "--help keys"),
        (["plan", "+experiment=nope"], "no experiment `nope`"),
        (["train", "+experiment=nope"], "no experiment `nope`"),
        (["plan", "--config-dir", "/nowhere/at/all"], "is not a folder"),
    ],
)
def test_a_mistake_ends_with_exit_code_2_and_a_remedy_on_stderr(say, words: list[str], told: str) -> None:
    said = say(*words)
    assert said.code == 2
    assert told in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("words", "opening"),
    [
        (["+experiment=quickstart"], "The run failed."),
        (["train"], "The run failed."),
        *(([name], f"`{name}` failed.") for name in commands.offered() if name not in ("train", "checkpoint")),
        *((["checkpoint", word, "a", "b"], f"`checkpoint {word}` failed.") for word in checkpoint.offered()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_fails_is_named_as_it_was_asked_for_and_only_a_training_is_a_run(
    say, monkeypatch: pytest.MonkeyPatch, words: list[str], opening: str
) -> None:
    def fails(*_: object) -> int:
        raise RunError("the disk is gone")

    named = words[0] if words[0] in commands.offered() else "train"
    module = checkpoint.subcommand(words[1]) if named == "checkpoint" else commands.command(named)
    monkeypatch.setattr(module, "run", fails)
    said = say(*words)
    assert said.code == 3
    assert said.err == f"{opening}\n1. the disk is gone\n"


def test_several_problems_are_numbered(say) -> None:
    said = say("plan", "model.hiden_size=1", "lr=2", "parallel.tensor=5", "--foo")
    assert said.err.startswith("6 problems; nothing was started.\n1. --foo: ")
    assert "\n3. lr: " in said.err
    assert "Found besides, with the settings above left out:\n4. " in said.err


def test_help_names_commands_groups_options_and_examples(say) -> None:
    said = say("--help")
    assert said.code == 0
    missing = [
        word
        for group in locate.GROUPS
        for word in (group, *locate.options(group), *commands.offered())
        if word not in said.out
    ]
    assert not missing
    assert "python -m orchestrator plan +experiment=llama7b_zero2" in said.out


@pytest.mark.parametrize("name", commands.offered())
def test_every_command_explains_itself_with_examples(say, name: str) -> None:
    for words in ([name, "--help"], ["--help", name], ["help", name]):
        said = say(*words)
        assert said.code == 0
        assert said.out.startswith("python -m orchestrator")
        assert "Exit code" in said.out
        assert said.out.count("python -m orchestrator") >= 3


@pytest.mark.parametrize(
    "topic", ["parallel", "training.tokens", "gpu", "gpu=h200", "+experiment", "llama70b_3d", "keys"]
)
def test_help_explains_groups_keys_options_and_experiments(say, topic: str) -> None:
    said = say("--help", topic)
    assert said.code == 0
    assert topic.partition("=")[2] or topic.lstrip("+") in said.out or topic == "keys"


def test_the_composed_configuration_is_printed_as_yaml(say) -> None:
    import yaml

    from orchestrator.config.compose import load_config
    from orchestrator.config.schema import RunConfig

    said = say("--cfg", "job", "+experiment=llama3_405b", "training.seed=3")
    assert RunConfig.model_validate(yaml.safe_load(said.out)) == load_config(
        ["+experiment=llama3_405b", "training.seed=3"]
    )


def test_a_foreign_models_package_in_the_current_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "plan"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"`import models` finds {tmp_path / 'models'}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_called_models_that_is_no_package_is_in_nobody_s_way(
    say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert locate.check_models_package() == ()


def test_the_version_is_printed(say) -> None:
    assert say("--version").out.startswith("orchestrator 0.")


def test_an_interrupt_leaves_no_traceback(say, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("orchestrator.cli.plan.plan_of", interrupted)
    said = say("plan")
    assert said.code == 4
    assert "the same command" in said.err


def test_a_defect_is_called_one_and_is_no_refusal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.cli.plan.plan_of", lambda invocation: 1 / 0)
    assert main(["plan"]) == 3
    told = capsys.readouterr().err
    assert "ZeroDivisionError" in told
    assert "defect of the program" in told


BLOCKED = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {forbidden}:
            raise ImportError("must not be imported here: " + name)
sys.meta_path.insert(0, Refuse())
from orchestrator.cli.main import main
code = main({words})
assert not {forbidden} & {{name.partition(".")[0] for name in sys.modules}}
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("words", "forbidden", "code"),
    [
        (["plan", "+experiment=llama7b_zero2", "--json"], {"torch", "ray", "rich", "mlflow"}, 0),
        (["plan", "+experiment=llama70b_3d"], {"torch", "ray", "mlflow"}, 0),
        (["--help"], {"torch", "ray", "rich", "mlflow"}, 0),
        (["+experiment=llama7b_zero2"], {"torch", "ray", "rich", "mlflow"}, 2),
    ],
    ids=["plan --json", "plan", "help", "a refused training"],
)
def test_nothing_heavy_is_imported(tmp_path: Path, words: list[str], forbidden: set[str], code: int) -> None:
    """Neither torch nor ray can be imported here: what would need them fails, instead of being slow."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(words=words, forbidden=forbidden)],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_a_training_without_its_gpus_names_them_what_is_there_and_the_plan_command(
    say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("orchestrator.launch.hardware.local_gpus", lambda: "no NVIDIA driver answers")
    said = say("+experiment=llama7b_zero2", "training.seed=3")
    assert said.code == 2
    assert "8 x A100-80GB needed" in said.err
    assert "no NVIDIA driver answers" in said.err
    assert "\n      python -m orchestrator plan +experiment=llama7b_zero2 training.seed=3\n" in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("wrong", "key", "needed"), [
    ("training.global_batch_size=7", "training.global_batch_size", "A100-80GB GPUs needed"),
    ("parallel.tensor=3", "parallel.tensor", "A100-80GB GPUs needed"),
    ("parallel=ddp", "cluster.gpu.memory_gib", "8 x A100-80GB needed"),
])  # fmt: skip
def test_a_plan_that_is_wrong_hides_no_missing_gpus(
    wrong: str, key: str, needed: str, say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("orchestrator.launch.hardware.local_gpus", lambda: "no NVIDIA driver answers")
    said = say("+experiment=llama7b_zero2", wrong)
    assert said.code == 2
    assert f"1. {key}: " in said.err
    assert f"{needed}; this machine has none: no NVIDIA driver answers" in said.err


@pytest.mark.parametrize("words", [["plan"], ["plan", "--json"], ["--help"]])
def test_a_closed_stdout_is_no_defect_of_the_program(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # what Python makes of `>&-`
    assert main(words) == 0


@pytest.mark.parametrize(("words", "code"), [([], 0), (["parallel.tensor=3"], 2), (["parallel.tensor=3", "--json"], 2)])
def test_a_reader_that_has_seen_enough_changes_no_exit_code(words: list[str], code: int, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody_reads:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", "plan", "+experiment=llama7b_zero2", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=nobody_reads,
            stderr=nobody_reads,
            check=False,
        )
    assert done.returncode == code


def test_a_pipe_of_its_own_that_breaks_is_a_failure_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(invocation: object) -> int:
        raise BrokenPipeError(32, "Broken pipe")  # of a connection, not of stdout

    monkeypatch.setattr("orchestrator.cli.plan.run", breaks)
    assert main(["plan"]) == 3
    assert "Broken pipe" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["plan"], ["plan", "--json"], ["--help"], ["plan", "--cfg", "job"]])
def test_a_full_disk_behind_stdout_is_told_without_a_traceback(words: list[str], tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "orchestrator", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "No space left on device" in done.stderr


def test_a_second_command_is_said_to_be_one(say) -> None:
    said = say("plan", "search", "training.steps=3")
    assert said.code == 2
    assert "`plan` is the command already." in said.err


def test_help_for_a_word_that_is_command_and_group_explains_both(say) -> None:
    said = say("--help", "checkpoint")
    assert "checkpoint export CHECKPOINT TARGET" in said.out
    assert "checkpoint.keep_last" in said.out


def test_a_command_after_its_settings_is_told_to_come_first(say) -> None:
    said = say("training.steps=3", "plan")
    assert said.code == 2
    assert "The command `plan` comes after other words." in said.err
    assert "Put `plan` first." in said.err
