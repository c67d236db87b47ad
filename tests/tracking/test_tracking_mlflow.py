"""One run is one MLflow run and each step is in it once, whatever was killed or repeated. Real SQLite stores."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from orchestrator.tracking.forwarding import Forwarding
from orchestrator.tracking.ledger import Ledger, read_ledger, write_ledger
from orchestrator.tracking.mlflow_run import make_database
from orchestrator.tracking.run_directory import HISTORY_NAME, RunDirectory
from tests.tracking.runs import end, new_run, once, only_run, points, record, rewind, runs_of

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")


def forward(run: RunDirectory, uri: str, *, ending: bool = False) -> Forwarding:
    """One forwarder that finds the run as it is, and one turn of it."""
    forwarding = Forwarding(run.path, uri)
    forwarding.turn(ending=ending)
    return forwarding


def test_a_run_is_recorded_with_its_configuration_numbers_and_files(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path, tracking__tags={"team": "one"}, tracking__run_name="shown")
    run.write_json("placement.json", [{"rank": 0}])
    record(run, [1, 2])
    record(run, [3], validation_loss=2.5)
    end(run)
    forward(run, uri, ending=True)
    found = only_run(uri)
    assert found.info.run_name == "shown"
    assert found.info.status == "FINISHED"
    assert found.data.params["model.hidden_size"] == "8"
    assert found.data.params["optimizer.betas"] == "[0.9, 0.95]"
    assert found.data.params["training.tokens"] == "null"
    assert found.data.tags["team"] == "one"
    assert found.data.tags["orchestrator.run_directory"] == str(run.path)
    assert found.data.tags["orchestrator.restarts"] == "0"
    for key in ("loss", "learning_rate", "gradient_norm", "tokens_per_second", "memory_bytes", "step_seconds"):
        assert points(uri, key) == once([1, 2, 3]), key
    assert points(uri, "validation_loss") == once([3])
    assert points(uri, "samples") == once([])
    assert found.data.metrics["predicted.step_seconds"] == 0.4
    assert found.data.metrics["measured.step_seconds"] == 0.5
    files = {item.path for item in MlflowClient(uri).list_artifacts(found.info.run_id)}
    assert files == {"config.yaml", "plan.json", "placement.json", "summary.json"}


@pytest.mark.parametrize(("status", "shown"), [("finished", "FINISHED"), ("failed", "FAILED"), ("stopped", "KILLED")])
def test_the_run_ends_as_it_ended(tmp_path: Path, uri: str, status: str, shown: str) -> None:
    run = new_run(tmp_path)
    record(run, [1])
    end(run, status, attempts=2)
    forward(run, uri, ending=True)
    assert only_run(uri).info.status == shown
    assert only_run(uri).data.tags["orchestrator.attempts"] == "2"
    assert only_run(uri).data.tags["orchestrator.causes"] == f"crash, {status}"


def commands(run: RunDirectory, *events: tuple[str, float]) -> None:
    """Say when the commands of a run took its folder and ended."""
    lines = [json.dumps({"event": event, "time": time}) + "\n" for event, time in events]
    (run.path / HISTORY_NAME).write_text("".join(lines))


def lifetime(uri: str) -> tuple[int, int]:
    info = only_run(uri).info
    return info.start_time, info.end_time


def test_the_run_lasts_as_long_as_it_did_however_late_it_is_sent(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path)
    commands(run, ("create", 1000.5), ("end", 1152.25))
    record(run, [1], time=1100.0)
    end(run)
    forward(run, uri, ending=True)
    assert lifetime(uri) == (1_000_500, 1_152_250)


def test_a_run_that_goes_on_keeps_its_start_and_ends_with_its_last_command(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path)
    commands(run, ("create", 1000.0), ("end", 1100.0))
    record(run, [1], time=1050.0)
    end(run, "stopped")
    forward(run, uri, ending=True)
    commands(run, ("create", 1000.0), ("end", 1100.0), ("continue", 5000.0), ("end", 6000.0))
    record(run, [2], time=5500.0)
    end(run)
    forward(run, uri, ending=True)
    assert lifetime(uri) == (1_000_000, 6_000_000)


def test_a_command_that_was_killed_ended_with_its_last_step(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path)
    commands(run, ("create", 1000.0))
    record(run, [1], time=1050.0)
    record(run, [2], time=1060.0)
    forward(run, uri, ending=True)
    assert lifetime(uri) == (1_000_000, 1_060_000)
    assert only_run(uri).info.status == "KILLED"


def test_the_run_is_there_as_soon_as_ranks_have_been_placed(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path)
    forwarding = Forwarding(run.path, uri)
    run.write_json("placement.json", [{"rank": 0}])
    assert forwarding.turn(ending=False)
    assert only_run(uri).info.status == "RUNNING"
    assert only_run(uri).data.params["model.hidden_size"] == "8"
    assert not forwarding.turn(ending=False), "and that is said once"
    later = Forwarding(run.path, uri)
    assert not later.turn(ending=False), "a placement of an earlier command is none of this one's"


def test_a_new_database_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"sqlite:///{tmp_path / 'new.db'}"

    def killed(*_: object, **__: object) -> None:
        assert not (tmp_path / "new.db").exists(), "others see nothing while its tables are made"
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(MlflowClient, "search_experiments", killed)
        make_database(uri)
    assert list(tmp_path.iterdir()) == []
    make_database(uri)
    assert [path.name for path in tmp_path.iterdir()] == ["new.db"]
    before = (tmp_path / "new.db").read_bytes()
    make_database(uri)
    assert (tmp_path / "new.db").read_bytes() == before
    assert [found.name for found in MlflowClient(uri).search_experiments()] == ["Default"]


def test_why_attempts_ended_and_how_long_each_way_back_took_is_in_the_record(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path)
    record(run, [1])
    end(run, attempts=3)
    forward(run, uri, ending=True)
    tags = only_run(uri).data.tags
    assert tags["orchestrator.causes"] == "crash, crash, finished"
    assert tags["orchestrator.restarts"] == "2"
    assert tags["orchestrator.recovery_seconds"] == "2.2, 4.5"


def test_the_degrees_of_the_plan_are_in_the_record_and_a_change_of_them_too(tmp_path: Path, uri: str) -> None:
    """`parallel.data=auto` says nothing, and a re-plan changes no configuration."""
    run = new_run(tmp_path)
    run.write_json("plan.json", {"parallel": {"data": 4, "schedule": "1f1b"}})
    record(run, [1])
    forwarding = forward(run, uri)
    assert only_run(uri).data.params["plan.data"] == "4"
    run.write_json("plan.json", {"parallel": {"data": 2, "schedule": "1f1b"}})
    end(run)
    forwarding.turn(ending=True)
    assert only_run(uri).data.params["plan.data"] == "4"
    assert only_run(uri).data.tags["changed.plan.data"] == "4 -> 2"
    assert "changed.plan.schedule" not in only_run(uri).data.tags


def test_steps_executed_again_after_a_restart_are_recorded_once(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path)
    forwarding = Forwarding(run.path, uri)
    record(run, range(1, 6))
    forwarding.turn(ending=False)
    record(run, [6, 7])
    rewind(run, 3)
    record(run, range(4, 10), attempt=2)
    forwarding.turn(ending=False)
    assert points(uri) == once(range(1, 10))
    assert only_run(uri).data.tags["orchestrator.attempt"] == "2"


def test_a_later_command_goes_on_in_the_same_run_and_notes_what_changed(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path, optimizer__lr=1e-3)
    record(run, [1, 2])
    end(run, "stopped")
    forward(run, uri, ending=True)
    run.close()
    again = new_run(tmp_path, optimizer__lr=2e-3)
    record(again, [3])
    forwarding = forward(again, uri)
    assert only_run(uri).info.status == "RUNNING"
    end(again)
    forwarding.turn(ending=True)
    assert points(uri) == once([1, 2, 3])
    found = only_run(uri)
    assert found.info.status == "FINISHED"
    assert found.data.params["optimizer.lr"] == "0.001"
    assert found.data.tags["changed.optimizer.lr"] == "0.001 -> 0.002"


def test_a_forwarder_killed_before_it_noted_a_batch_sends_none_of_it_again(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path)
    record(run, range(1, 4))
    forward(run, uri)
    noted = read_ledger(run.path)
    assert noted is not None
    record(run, range(4, 8))
    forward(run, uri)
    write_ledger(run.path, noted)  # As if the second one had died right after the store took its batch.
    rewind(run, 5)
    record(run, range(6, 10), attempt=2)
    forward(run, uri)
    assert points(uri) == once(range(1, 10))


def test_a_forwarder_killed_before_it_noted_the_new_run_finds_it_again(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path)
    record(run, [1])
    first = forward(run, uri)
    write_ledger(run.path, Ledger(uri, token=first.ledger.token))
    record(run, [2])
    assert forward(run, uri).ledger.run_id == first.ledger.run_id
    assert points(uri) == once([1, 2])


def test_ending_twice_adds_nothing(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path)
    record(run, [1, 2, 3])
    end(run)
    forward(run, uri, ending=True)
    forward(run, uri, ending=True)
    assert points(uri) == once([1, 2, 3])
    assert points(uri, "measured.step_seconds") == once([3])


def test_the_run_id_of_the_environment_is_honoured(tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = MlflowClient(uri)
    run_id = client.create_run(client.create_experiment("toys")).info.run_id
    client.log_metric(run_id, "loss", 9.0, step=50)  # Somebody else's point is not taken for ours.
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    run = new_run(tmp_path)
    record(run, [1, 2])
    assert forward(run, uri).ledger.run_id == run_id
    assert points(uri) == once([1, 2, 50])


def test_an_unknown_run_id_of_the_environment_is_an_error_not_another_run(
    tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    run = new_run(tmp_path)
    record(run, [1])
    with pytest.raises(Exception, match=f"{'0' * 32} does not exist"):
        forward(run, uri)
    assert runs_of(uri) == []


def test_when_the_noted_run_was_deleted_a_new_one_gets_the_whole_record(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path)
    record(run, [1, 2])
    deleted = forward(run, uri).ledger.run_id
    assert deleted is not None
    MlflowClient(uri).delete_run(deleted)
    record(run, [3])
    replaced = forward(run, uri).ledger.run_id
    assert replaced is not None
    assert replaced != deleted
    history = MlflowClient(uri).get_metric_history(replaced, "loss")
    assert sorted(point.step for point in history) == [1, 2, 3]


def test_another_store_gets_the_whole_record(tmp_path: Path, uri: str, empty_database: Path) -> None:
    run = new_run(tmp_path)
    record(run, [1, 2])
    forward(run, uri)
    other = tmp_path / "other.db"
    other.write_bytes(empty_database.read_bytes())
    forward(run, f"sqlite:///{other}")
    assert points(f"sqlite:///{other}") == once([1, 2])


def test_long_values_are_cut_and_odd_tags_left_out(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path, data__path="x" * 10_000, tracking__tags={"good": "1", "b@d*": "2"})
    record(run, [1])
    forward(run, uri)
    found = only_run(uri)
    assert len(found.data.params["data.path"]) <= 6000
    assert found.data.params["data.path"].endswith("[10000 characters, all of them in config.yaml]")
    assert found.data.tags["good"] == "1"
    assert "b@d*" not in found.data.tags


def test_more_steps_than_one_call_takes_all_arrive(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path)
    record(run, range(1, 201))
    forward(run, uri)
    assert points(uri) == once(range(1, 201))
    assert points(uri, "tokens") == once(range(1, 201))


def test_a_loss_that_is_not_a_number_is_recorded(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path)
    record(run, [1], loss=math.nan)
    forward(run, uri)
    assert math.isnan(MlflowClient(uri).get_run(only_run(uri).info.run_id).data.metrics["loss"])


def test_a_run_without_a_single_step_is_recorded_as_failed(tmp_path: Path, uri: str) -> None:
    run = new_run(tmp_path)
    end(run, "failed", steps=0)
    forward(run, uri, ending=True)
    assert only_run(uri).info.status == "FAILED"


def test_nothing_is_asked_of_mlflow_while_there_is_nothing_to_send(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert not Forwarding(run.path, "http://127.0.0.1:1").turn(ending=False)
