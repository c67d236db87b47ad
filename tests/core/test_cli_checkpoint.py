"""`checkpoint ls` and `checkpoint verify` from outside: what they find, what they say, their exit codes."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from orchestrator.checkpoint import find
from orchestrator.checkpoint.folder import BROKEN, TEMPORARY
from orchestrator.checkpoint.storage import Folder
from orchestrator.cli.main import main
from tests.core.run_cases import run_config
from tests.core.test_checkpoint_folder import checkpoint, cut, cut_manifest, flip, remove_shard


class Said:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]):
    def run(*words: str | Path) -> Said:
        code = main(["checkpoint", *map(str, words)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Said(code, captured.out, captured.err)

    return run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of runs with one run `mine` in it, which has three checkpoints and two left-overs."""
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "runs" / "mine"
    facts = {"parallel": {"data": 4, "tensor": 2, "zero_stage": 3}, "loss": 2.25, "saved_at": 1.0}
    for step in (100, 200, 300):
        checkpoint(mine / "checkpoints", step, config=run_config("runs").to_dict(), **facts)
    checkpoint(mine / "checkpoints", 400, f"{TEMPORARY}step-00000400-ab12")
    checkpoint(mine / "checkpoints", 50, f"{BROKEN}step-00000050-cd34")
    (mine / "config.yaml").write_text("checkpoint: {directory: null}\n")
    return mine / "checkpoints"


def listed(say, *words: str | Path) -> dict[str, object]:
    said = say("ls", *words, "--json")
    assert said.code == 0
    (directory,) = json.loads(said.out)["directories"]
    return directory


@pytest.mark.parametrize("word", ["mine", "runs/mine", "runs/mine/checkpoints"])
def test_a_run_its_folder_and_its_checkpoints_are_the_same(say, runs: Path, word: str) -> None:
    found = listed(say, word)
    assert found["directory"] == str(runs)
    assert found["resume"] == str(runs / "step-00000300")
    assert [(entry["step"], entry["state"]) for entry in found["checkpoints"]] == [
        (100, "complete"),
        (200, "complete"),
        (300, "complete"),
        (50, "damaged, set aside"),
        (400, "unfinished save"),
    ]


def test_every_run_is_listed_when_none_is_named(say, runs: Path) -> None:
    assert listed(say)["directory"] == str(runs)
    assert "no runs here" in say("ls", "run.directory=elsewhere").out


def test_checkpoints_kept_elsewhere_are_found_by_the_runs_name(say, runs: Path, tmp_path: Path) -> None:
    checkpoint(tmp_path / "shared" / "mine", 7)
    (runs.parent / "config.yaml").write_text(f"checkpoint: {{directory: {tmp_path}/shared}}\n")
    assert listed(say, "mine")["directory"] == str(tmp_path / "shared" / "mine")


def test_the_list_for_people_has_plan_loss_and_where_the_run_goes_on(say, runs: Path) -> None:
    remove_shard(runs / "step-00000300")
    lines = say("ls", "mine").out.splitlines()
    (newest,) = (line for line in lines if line.startswith("*"))
    assert newest.split()[1:3] == ["200", "complete"]
    assert "data 4 · tensor 2 · ZeRO 3" in newest
    assert "2.2500" in newest
    assert "      __0_0.distcp is missing" in lines
    assert lines[-1] == "a run would go on from step 200"


@pytest.mark.parametrize("word", ["mine", "runs/mine/checkpoints"])
def test_a_finished_run_goes_on_by_asking_for_more_alone(say, runs: Path, word: str) -> None:
    (runs.parent / "summary.json").write_text(json.dumps({"status": "finished"}))
    assert listed(say, word)["resume"] is None
    lines = say("ls", word).out.splitlines()
    assert not [line for line in lines if line.startswith("*")]
    assert lines[-2] == "the run has finished: its command begins another"
    assert lines[-1] == f"to go on from step 300 with more steps: checkpoint.resume={runs / 'step-00000300'}"
    (runs.parent / "summary.json").write_text(json.dumps({"status": "stopped"}))
    assert listed(say, word)["resume"] == str(runs / "step-00000300")


def test_checkpoints_kept_elsewhere_belong_to_the_run_that_was_named(say, runs: Path, tmp_path: Path) -> None:
    checkpoint(tmp_path / "shared" / "mine", 7)
    (runs.parent / "config.yaml").write_text(f"checkpoint: {{directory: {tmp_path}/shared}}\n")
    (runs.parent / "summary.json").write_text(json.dumps({"status": "finished"}))
    assert listed(say, "mine")["resume"] is None


def test_one_checkpoint_can_be_listed(say, runs: Path) -> None:
    found = listed(say, runs / "step-00000200")
    assert [entry["step"] for entry in found["checkpoints"]] == [200]
    assert found["resume"] is None


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip, "__0_0.distcp has another xxh3_128"),
        (cut, "__0_0.distcp has 2 bytes"),
        (remove_shard, "__0_0.distcp is missing"),
        (cut_manifest, "manifest.json cannot be read"),
    ],
)
def test_verify_names_the_file_and_ends_with_3(say, runs: Path, damage, named: str) -> None:
    assert say("verify", "mine").code == 0
    damage(runs / "step-00000200")
    said = say("verify", "mine")
    assert said.code == 3
    assert named in said.out
    assert [line.split()[0] for line in said.out.splitlines() if "step-" in line] == ["complete", "damaged", "complete"]
    assert say("verify", runs / "step-00000200").code == 3
    assert say("verify", runs / "step-00000100").code == 0
    values = json.loads(say("verify", "mine", "--json").out)
    assert values["complete"] is False
    assert [bool(entry["faults"]) for entry in values["checkpoints"]] == [False, True, False]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "It was not said what to do with checkpoints"),
        (("lss",), "Did you mean `ls`?"),
        (("verify",), "It was not said which checkpoints"),
        (("verify", "nine"), "Did you mean `mine`?"),
        (("ls", "nowhere/"), "There is no run 'nowhere/'"),
        (("ls", "mine", "model.hidden_size=3"), "does not use model.hidden_size=3"),
        (("ls", "gs://bucket/prefix"), "storage of the kind gs:// is not known"),
    ],
)
def test_what_means_nothing_is_refused(say, runs: Path, words: tuple[str, ...], said: str) -> None:
    answer = say(*words)
    assert answer.code == 2
    assert said in " ".join(answer.err.split())


def test_a_folder_without_checkpoints_has_none_to_verify(say, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").touch()
    assert say("verify", "empty").code == 2
    assert "no checkpoints" in say("ls", "empty").out


def test_what_a_run_deletes_while_it_is_looked_at_is_not_damaged(
    say, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = find.look_at

    def deleted_meanwhile(folder: Folder, *, read_bytes: bool = False) -> find.Listed:
        if folder.name == "step-00000100":
            folder.remove()
        return look(folder, read_bytes=read_bytes)

    monkeypatch.setattr(find, "look_at", deleted_meanwhile)
    said = say("verify", "mine")
    assert said.code == 0
    assert [line.split()[0] for line in said.out.splitlines()] == ["complete", "complete"]


def test_a_folder_that_may_not_be_read_is_named(say, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: Folder) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(directory))

    monkeypatch.setattr(find, "committed_folders", refuse)
    said = say("ls", "mine")
    assert said.code == 3
    assert said.err.startswith("`checkpoint ls` failed.\n1. ")
    assert f"{runs} may not be read or written by this user" in " ".join(said.err.split())
