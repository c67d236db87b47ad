"""`compare` on real MLflow stores: which runs its words mean, what it refuses, what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from orchestrator.cli.main import main
from orchestrator.tracking.forwarding import Forwarding
from tests.tracking.runs import end, new_run, record

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")
SUMMARY = {"measured": {"tokens_per_second": 200.0, "peak_bytes": 1000}}


def trained(folder: Path, uri: str, name: str, **more: Any) -> str:
    """A finished run in the store; its MLflow id."""
    run = new_run(folder, uri, run__name=name, **more)
    run.write_json("plan.json", {"parallel": {"data": 2, "zero_stage": 1, "zero_group": 2, "world_size": 2}})
    record(run, [1, 2, 3])
    end(run, **SUMMARY)
    forwarding = Forwarding(run.path, uri)
    forwarding.turn(ending=True)
    assert forwarding.ledger.run_id is not None
    return forwarding.ledger.run_id


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]):
    def run(*words: str) -> tuple[int, str, str]:
        code = main(["compare", *words])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


def names(say, *words: str) -> list[str]:
    code, out, err = say(*words, "--json")
    assert code == 0, err
    return [run["name"] for run in json.loads(out)["runs"]]


def test_words_mean_names_patterns_ids_and_folders(tmp_path: Path, uri: str, say) -> None:
    ids = {name: trained(tmp_path, uri, name) for name in ("one", "two", "twin")}
    trained(tmp_path, uri, "apart", tracking__experiment="others")
    store = f"tracking.uri={uri}"
    assert set(names(say, store)) == {"one", "two", "twin", "apart"}
    assert names(say, store, "two") == ["two"]
    assert set(names(say, store, "tw*")) == {"two", "twin"}
    assert names(say, store, ids["one"][:8]) == ["one"]
    assert names(say, store, str(tmp_path / "runs" / "twin")) == ["twin"]
    assert set(names(say, store, "tracking.experiment=others")) == {"apart"}
    assert names(say, store, "--last", "1") == ["apart"]
    code, out, err = say(store, "on", "t*", "three", "'")
    assert (code, out) == (2, "")
    assert "Did you mean" in err
    assert err.count("has no run") == 3


def test_a_run_is_shown_with_its_plan_and_numbers(tmp_path: Path, uri: str, say) -> None:
    trained(tmp_path, uri, "one")
    page = tmp_path / "page.html"
    code, out, _ = say(f"tracking.uri={uri}", "--html", str(page))
    assert code == 0
    assert "data 2 · ZeRO 1" in out
    assert "200" in out
    assert "one" in page.read_text()
    assert "<svg" in page.read_text()


def test_runs_of_others_in_the_store_are_left_out(tmp_path: Path, uri: str, say) -> None:
    trained(tmp_path, uri, "one")
    client = MlflowClient(uri)
    client.create_run(client.create_experiment("foreign"), run_name="theirs")
    assert names(say, f"tracking.uri={uri}") == ["one"]


def test_a_store_that_is_not_there_is_refused_and_not_made(tmp_path: Path, monkeypatch, say) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = say()
    assert code == 2
    assert "There is no record of runs" in err
    assert list(tmp_path.iterdir()) == []


def test_a_store_without_runs_says_what_to_do(uri: str, say) -> None:
    code, _, err = say(f"tracking.uri={uri}")
    assert code == 2
    assert "holds no run" in err


def test_a_file_that_is_no_store_fails_with_a_message(tmp_path: Path, say) -> None:
    (tmp_path / "text.db").write_text("not a database " * 100)
    code, _, err = say(f"tracking.uri=sqlite:///{tmp_path / 'text.db'}")
    assert code == 3
    assert "`compare` failed." in err


def test_a_server_that_does_not_answer_fails_with_a_message(say) -> None:
    code, _, err = say("tracking.uri=http://localhost:9")
    assert code == 3
    assert "does not answer: [Errno" in " ".join(err.split())


def test_all_mistakes_are_named_together(tmp_path: Path, uri: str, say) -> None:
    code, _, err = say(
        "a", "parallel.tensor=2", "+experiment=x", "--last=0", f"--html={tmp_path / 'no' / 'page.html'}", "--write"
    )
    assert code == 2
    for word in ("parallel.tensor", "+experiment", "--last", "--html", "--write"):
        assert word in err, word


def test_an_experiment_that_is_not_there_is_named_with_those_that_are(tmp_path: Path, uri: str, say) -> None:
    trained(tmp_path, uri, "one")
    code, _, err = say(f"tracking.uri={uri}", "tracking.experiment=toy")
    assert code == 2
    assert "The experiments are" in err
    assert "toys" in err


def test_a_folder_whose_record_is_elsewhere_says_where(tmp_path: Path, uri: str, empty_database: Path, say) -> None:
    trained(tmp_path, uri, "one")
    code, _, err = say(f"tracking.uri=sqlite:///{empty_database}", str(tmp_path / "runs" / "one"))
    assert code == 2
    assert f"tracking.uri={uri}" in err
