"""What `submit` refuses before anything is sent, and what paths mean in a job."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from orchestrator.cli import main as cli
from orchestrator.cli import submit
from orchestrator.cli.invocation import parse
from orchestrator.config import job_paths
from orchestrator.config.compose import load_config
from orchestrator.errors import ConfigError
from orchestrator.launch import jobs
from orchestrator.launch.jobs import JobEnd, find_dashboard
from orchestrator.launch.upload import Upload

TOKEN = "a-token-of-the-cluster"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH",
                 "MLFLOW_TRACKING_URI", job_paths.JOB_VARIABLE, job_paths.WAIT_VARIABLE):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def dashboard(version: str, token: str = "") -> Iterator[str]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said = self.headers.get("Authorization")
            if token and said != f"Bearer {token}":
                self.send_error(403 if said else 401)
                return
            body = json.dumps({"ray_version": version}).encode() if version else b"<html>"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(jobs.importlib.metadata, "version", lambda _: "2.60.0")
    yield from dashboard("2.60.1")


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(jobs.importlib.metadata, "version", lambda _: "2.60.0")
    yield from dashboard("2.9.3")


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(jobs.importlib.metadata, "version", lambda _: "2.60.0")
    yield from dashboard("2.60.0", TOKEN)


@pytest.fixture
def other_page() -> Iterator[str]:
    yield from dashboard("")


def refusal(address: str | None) -> str:
    with pytest.raises(ConfigError) as caught:
        find_dashboard(address)
    (problem,) = caught.value.problems
    return str(problem)


def test_a_dashboard_is_found_with_and_without_its_scheme(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_dashboard(f"{ours}/") == ours
    assert find_dashboard(ours.removeprefix("http://")) == ours
    monkeypatch.setenv("RAY_ADDRESS", ours)
    assert find_dashboard(None) == ours


def test_an_address_that_does_not_answer_is_refused_with_ways_to_reach_it() -> None:
    said = refusal("http://127.0.0.1:1")
    assert "no dashboard answers there" in said
    assert "ssh -L 8265" in said


def test_without_a_scheme_the_head_is_tried_as_well() -> None:
    assert "nothing answers there" in refusal("127.0.0.1:1")


def test_the_address_of_ray_client_is_refused() -> None:
    assert "http://HEAD:8265" in refusal("ray://head:10001")


def test_another_page_is_not_taken_for_a_dashboard(other_page: str) -> None:
    assert "no dashboard answers there" in refusal(other_page)


def test_another_version_of_ray_is_named_with_ours(old: str) -> None:
    said = refusal(old)
    assert "it runs Ray 2.9.3, and this package needs 2.60.0" in said


def test_a_missing_and_a_wrong_token_are_told_apart(guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "asks for a token and there is none here" in refusal(guarded)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    assert "does not accept the token from RAY_AUTH_TOKEN" in refusal(guarded)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    assert find_dashboard(guarded) == guarded


def test_a_token_that_lies_ready_is_used(guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    assert find_dashboard(guarded) == guarded


# -- paths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ([], ["run.directory"]),
        (["run.directory=/shared/runs"], []),
        (["run.directory='~/runs'"], ["run.directory"]),
        (["run.directory=/shared/runs", "checkpoint.directory=saved"], ["checkpoint.directory"]),
        (["run.directory=/shared/runs", "checkpoint.directory=s3://bucket/saved"], []),
        (["run.directory=../runs", "checkpoint.directory=./saved"], ["run.directory", "checkpoint.directory"]),
    ],
)
def test_relative_places_of_output_are_refused_in_a_job(words: list[str], keys: list[str]) -> None:
    assert [problem.key for problem in job_paths.output_problems(load_config(words))] == keys


def test_relative_input_is_refused_unless_it_is_part_of_the_upload() -> None:
    config = load_config(["data=text", "data.path=texts", "data.tokenizer=tokenizer.json", "model=smollm2_135m"])
    assert [p.key for p in job_paths.input_problems(config, lambda path: path == "texts")] == ["data.tokenizer"]
    assert job_paths.input_problems(load_config([]), lambda _: False) == []


@pytest.mark.parametrize(
    ("words", "environment", "uri"),
    [
        ([], {}, "sqlite:////shared/runs/mlflow.db"),
        (["tracking.uri=sqlite:///mine.db"], {}, "sqlite:////shared/runs/mine.db"),
        (["tracking.uri=sqlite:////data/mine.db"], {}, None),
        ([], {"MLFLOW_TRACKING_URI": "http://tracker:5000"}, None),
    ],
)
def test_the_record_of_a_job_lies_beside_its_runs(
    words: list[str], environment: dict[str, str], uri: str | None
) -> None:
    config = load_config(["run.directory=/shared/runs", *words])
    assert job_paths.tracking_in_a_job(config, environment) == uri


def test_a_command_in_a_job_refuses_what_the_job_would_lose(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(job_paths.JOB_VARIABLE, "{}")
    monkeypatch.setenv(job_paths.WAIT_VARIABLE, "90")
    assert cli.main(["train", "parallel.tensor=3"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "run.directory: run.directory=runs is relative" in said
    assert "Set tracking.uri=sqlite:////shared/runs/mlflow.db" in said


def test_a_job_that_would_be_killed_before_it_has_saved_is_warned_of_with_the_setting() -> None:
    config, job = load_config(["fault_tolerance.grace_seconds=45.5"]), {job_paths.JOB_VARIABLE: "{}"}
    warning = job_paths.stop_warning(config, job)
    assert warning is not None
    assert "after 3 s" in warning
    assert '"RAY_JOB_STOP_WAIT_TIME_S": "106"' in warning
    assert job_paths.stop_warning(config, {**job, job_paths.WAIT_VARIABLE: "106"}) is None
    assert job_paths.stop_warning(config, {}) is None


# -- the command ------------------------------------------------------------------------------------------------------


def test_everything_against_a_job_is_said_at_once_and_nothing_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["training.stepz=3", "checkpoint.directory=saved", "run.name=a/b"]
    words = ["submit", "--address", "http://127.0.0.1:1", *wrong]
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    for key in ("training.stepz", "run.directory", "checkpoint.directory", "run.name"):
        assert key in said


def test_a_plan_that_does_not_fit_is_refused_before_anything_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", "+experiment=llama7b_zero2", "parallel=ddp", "run.directory=/shared/runs"]
    assert cli.main(words) == 2
    assert "parallel" in capsys.readouterr().err


def test_a_live_cluster_is_left_to_the_job_to_ask() -> None:
    made = parse(["submit", "cluster=ray", "run.directory=/shared/runs", "+experiment=llama70b_3d"])
    _, words = submit._judge(made, Path.cwd())
    assert words[:3] == ["cluster=ray", "run.directory=/shared/runs", "+experiment=llama70b_3d"]
    assert words[3:] == ["tracking.uri=sqlite:////shared/runs/mlflow.db"]


def test_the_entrypoint_is_quoted_and_has_the_folder_of_the_users_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    made = parse(["submit", "run.name=a b", "--config-dir", str(tmp_path / "mine")])
    line = submit._entrypoint(made, made.overrides, "http://head.invalid:8265")
    assert line == "python -m orchestrator train 'run.name=a b' --config-dir mine"


class Client:
    """A dashboard whose line breaks after the first lines of the log; the log is told from its beginning each time."""

    LOG = ("Running entrypoint for job j: python\n", "step 1\nst", "ep 2\n", "orchestrator exit code: 4\n")

    def __init__(self) -> None:
        self.calls = 0

    async def tail_job_logs(self, job: str):
        self.calls += 1
        for number, text in enumerate(self.LOG):
            if self.calls == 1 and number == 2:
                raise aiohttp.ServerDisconnectedError
            yield text

    def get_job_info(self, job: str) -> SimpleNamespace:
        status = SimpleNamespace(value="STOPPED", is_terminal=lambda: True)
        return SimpleNamespace(status=status, driver_exit_code=None, message="")


def test_the_log_goes_on_where_a_lost_connection_left_it_and_its_last_line_is_the_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "_AGAIN_SECONDS", 0.001)
    written, told = [], []
    end = jobs.follow(Client(), "j", written.append, told.append)
    assert "".join(written) == "step 1\nstep 2\n"
    assert (end.status, end.code, end.started) == ("STOPPED", 4, True)
    assert ["does not answer" in text for text in told] == [True]


def test_a_dashboard_that_stays_away_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_AGAIN_SECONDS", 0.001)
    monkeypatch.setattr(jobs, "_LOST_SECONDS", 0.003)
    monkeypatch.setattr(Client, "get_job_info", lambda *_: (_ for _ in ()).throw(ConnectionError("gone")))
    end = jobs.follow(Client(), "j", lambda _: None, lambda _: None)
    assert end.status == "UNKNOWN"


def test_a_job_gets_the_network_s_and_the_record_s_variables_those_that_are_named_and_time_to_save(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0", "MLFLOW_TRACKING_TOKEN": "t", "AWS_KEY": "k",
             "AWS_SECRET": "s", "MINE": "m", "UNRELATED": "u"}  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    config = load_config(["fault_tolerance.grace_seconds=120"])
    made = parse(["submit", "--env", "AWS_*,MINE"])
    (tmp_path / "mine.txt").write_text("mine")
    upload = Upload(tmp_path, (), {"mine.txt": 4}, complete=True)
    with submit._runtime_env(config, made, upload) as values:
        assert {name: values["env_vars"].get(name) for name in given} == {**given, "UNRELATED": None}
        assert values["env_vars"][job_paths.WAIT_VARIABLE] == "180"
        sent = Path(values["working_dir"])
        assert (sent / "mine.txt").read_text() == "mine"
        assert (sent / "orchestrator" / "conf" / "config.yaml").is_file()
        assert (sent / "models" / "registry.py").is_file()
    with (
        pytest.raises(ConfigError, match="NOT_SET is not set here"),
        submit._runtime_env(config, parse(["submit", "--env", "NOT_SET"]), upload),
    ):
        pass


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (JobEnd("SUCCEEDED", 0, True, ""), 0),
        (JobEnd("FAILED", 2, True, ""), 2),
        (JobEnd("FAILED", 3, True, ""), 3),
        (JobEnd("STOPPED", 4, True, ""), 4),
        (JobEnd("STOPPED", None, True, ""), 3),
        (JobEnd("STOPPED", None, False, ""), 4),
        (JobEnd("FAILED", 127, True, "not found"), 3),
        (JobEnd("FAILED", -9, True, "killed"), 3),
        (JobEnd("UNKNOWN", None, True, "the dashboard was not reached"), 3),
    ],
)
def test_the_exit_code_is_the_trainings_or_says_what_is_known(end: JobEnd, code: int) -> None:
    assert submit._exit_code(end, "job") == code


def test_a_job_whose_environment_could_not_be_made_was_not_started() -> None:
    with pytest.raises(ConfigError, match="was not started: no such image"):
        submit._exit_code(JobEnd("FAILED", None, False, "no such image"), "job")


@pytest.mark.parametrize(("flag", "command"), [("--write", "plan"), ("--no-wait", "inventory"), ("--address", "train")])
def test_flags_of_one_command_are_refused_by_the_others(
    flag: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, flag, *(["x:1"] if flag == "--address" else [])]) == 2
    assert f"`{command}` does not know {flag}" in capsys.readouterr().err
