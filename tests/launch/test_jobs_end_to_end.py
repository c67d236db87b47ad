"""Trainings sent as jobs to a real Ray head with its dashboard: stopped and continued, refused, failed, and Ray's own
command. The head asks for a token; the submitter finds it where Ray would."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.tracking.attempts import executed_steps

pytestmark = pytest.mark.ray

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 240
TOKEN = "0123456789abcdef" * 4


@dataclass
class Head:
    """A Ray head with dashboard, and a folder that all its nodes (there is one) share."""

    url: str
    address: str
    folder: Path
    environment: dict[str, str]

    def words(self, name: str, steps: int, *more: str) -> list[str]:
        """A training of a very small model on a very small text."""
        return [
            f"run.name={name}", f"run.directory={self.folder / 'runs'}", "model.hidden_size=64",
            "model.intermediate_size=128", "model.num_hidden_layers=2", "model.num_attention_heads=4",
            "model.max_position_embeddings=64", "training.sequence_length=64", "training.global_batch_size=4",
            "training.micro_batch_size=2", f"training.steps={steps}", "training.validate_every_steps=0",
            "training.validation_sequences=8", "data=text", f"data.path={self.folder / 'text'}",
            "data.validation_fraction=0.2", f"data.cache_directory={self.folder / 'cache'}", *more,
        ]  # fmt: skip

    def start(self, *words: str, cwd: Path = ROOT, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator", *words],
            cwd=cwd,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str, cwd: Path = ROOT, **environment: str) -> tuple[int, str]:
        """(exit code, everything that was printed)."""
        process = self.start(*words, cwd=cwd, **environment)
        out, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert "Traceback" not in out
        return process.returncode, out

    def file(self, name: str, file: str) -> Any:
        return json.loads((self.folder / "runs" / name / file).read_text(encoding="utf-8"))


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answers(url: str) -> bool:
    request = urllib.request.Request(f"{url}/api/version", headers={"Authorization": f"Bearer {TOKEN}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with contextlib.suppress(urllib.error.URLError, OSError), opener.open(request, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "text").mkdir()
    for number in range(40):
        words = " ".join(f"word{number * index % 97}" for index in range(200))
        (folder / "text" / f"{number}.txt").write_text(words, encoding="utf-8")
    (folder / "token").write_text(TOKEN, encoding="utf-8")
    gcs, port, client = free_port(), free_port(), free_port()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_"))}
    common = {**kept, "OMP_NUM_THREADS": "1", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    short = Path("/tmp") / f"jobs-{os.getpid()}"  # paths of sockets must be short
    process = subprocess.Popen(
        [
            Path(sys.executable).parent / "ray", "start", "--head", "--block", f"--port={gcs}",
            f"--dashboard-port={port}", "--dashboard-host=127.0.0.1", "--node-ip-address=127.0.0.1", "--num-cpus=2",
            f"--temp-dir={short}", "--object-store-memory=80000000", "--disable-usage-stats",
            f"--ray-client-server-port={client}", "--dashboard-agent-listen-port=0",
        ],
        env={
            **common,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "RAY_worker_niceness": "0",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not answers(url):
        assert process.poll() is None, "Ray's head has ended"
        assert time.monotonic() < deadline, "Ray's dashboard has not come up"
        time.sleep(0.2)
    yield Head(url, f"127.0.0.1:{gcs}", folder, {**common, "RAY_AUTH_TOKEN_PATH": str(folder / "token")})
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:  # its handler can lock up after its children are gone
        process.kill()
        process.wait()
    shutil.rmtree(short, ignore_errors=True)


@pytest.fixture(scope="module")
def stopped(head: Head) -> tuple[int, str]:
    """A job that would train for long, stopped with Ctrl-C at its first step."""
    process = head.start("submit", "--address", head.url, *head.words("one", 100_000))
    assert process.stdout is not None
    out = ""
    for line in process.stdout:
        out += line
        if line.startswith("step ") and "stopping the job" not in out:
            process.send_signal(signal.SIGINT)
            out += "stopping the job\n"
    return process.wait(PATIENCE_SECONDS), out


@pytest.fixture(scope="module")
def finished(head: Head, stopped: tuple[int, str]) -> tuple[int, str]:
    """The same run once more, with an end a few steps ahead, sent from a folder where this package is not."""
    elsewhere = head.folder / "elsewhere"
    (elsewhere / "mine" / "checkpoint").mkdir(parents=True)
    (elsewhere / "mine" / "checkpoint" / "mine.yaml").write_text("# Mine.\nkeep_last: 1\n", encoding="utf-8")
    steps = head.file("one", "summary.json")["steps"] + 5
    words = ["--config-dir", "mine", "checkpoint=mine", *head.words("one", steps)]
    return head.run("submit", "--address", head.url, *words, cwd=elsewhere, PYTHONPATH=str(ROOT))


def test_ctrl_c_stops_the_job_after_it_has_saved_and_brings_its_code_home(head: Head, stopped: tuple[int, str]) -> None:
    code, out = stopped
    assert code == 4, out
    assert "SIGTERM: saving and stopping" in out
    assert out.splitlines()[-1] == str(head.folder / "runs" / "one")
    summary = head.file("one", "summary.json")
    assert summary["status"] == "stopped"
    assert summary["checkpoint"].endswith(f"step-{summary['steps']:08d}")
    assert summary["mlflow_run_id"], "the record was sent although the job's processes were told to end"
    assert (head.folder / "runs" / "mlflow.db").exists()


def test_the_log_is_followed_as_the_command_prints_it_and_nothing_of_ray_s_client(stopped: tuple[int, str]) -> None:
    _, out = stopped
    assert "uploading" in out
    assert "the MLflow record goes to sqlite:////" in out
    assert "orchestrator exit code" not in out
    assert [line for line in out.splitlines() if "packaging.py" in line or "sdk.py" in line] == []


def test_the_same_command_continues_the_job_to_its_end(head: Head, finished: tuple[int, str]) -> None:
    code, out = finished
    assert code == 0, out
    summary = head.file("one", "summary.json")
    attempts = summary["attempts"]
    assert [attempt["cause"] for attempt in attempts] == ["stopped", "finished"]
    assert attempts[1]["first_step"] == attempts[0]["last_step"] + 1
    assert executed_steps(attempts) == summary["steps"]


def test_a_plan_for_hardware_that_the_cluster_lacks_is_refused_by_the_job(head: Head) -> None:
    words = ["+experiment=llama7b_zero2", f"run.directory={head.folder / 'runs'}"]
    code, out = head.run("submit", "--address", head.address, *words)  # the head's address serves as well
    assert code == 2
    assert "8 x A100-80GB needed" in out
    assert "nothing was started" in out


@pytest.mark.slow
def test_a_training_that_fails_ends_the_command_with_its_code_and_its_reason(head: Head) -> None:
    words = head.words("broken", 100_000, "fault_tolerance.max_restarts=0")
    process = head.start("submit", "--address", head.url, *words)
    assert process.stdout is not None
    out, killed = "", False
    for line in process.stdout:
        out += line
        if line.startswith("step ") and not killed:
            killed = True
            os.kill(head.file("broken", "placement.json")[1]["pid"], signal.SIGKILL)
    assert process.wait(PATIENCE_SECONDS) == 3, out
    assert "killed by SIGKILL" in out
    assert head.file("broken", "summary.json")["status"] == "failed"


def test_a_wrong_token_is_told_by_the_head_and_by_the_dashboard(head: Head) -> None:
    wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wrong"}
    for words in (["inventory", "--address", head.address], ["submit", "--address", head.url, *head.words("no", 1)]):
        code, out = head.run(*words, **wrong)
        assert code == 2
        assert "does not accept the token from RAY_AUTH_TOKEN" in unwrapped(out)


@pytest.mark.slow
def test_a_cluster_without_gpus_is_told(head: Head) -> None:
    code, out = head.run("inventory", RAY_ADDRESS=head.address)
    assert code == 2
    assert "no GPU: not used for training" in out
    assert "the only living node of this cluster gives out no GPU" in unwrapped(out)


@pytest.mark.slow
def test_ray_s_own_command_works_with_the_setting_that_the_page_names(head: Head) -> None:
    ray = str(Path(sys.executable).parent / "ray")
    environment = {**head.environment, "RAY_AUTH_MODE": "token", "RAY_ADDRESS": head.url}
    wait = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "90"}})
    words = head.words("by_ray", 100_000, f"tracking.uri=sqlite:///{head.folder}/by_ray.db")
    command = [ray, "job", "submit", "--submission-id=by-ray", "--working-dir=.", f"--runtime-env-json={wait}", "--"]
    process = subprocess.Popen(
        [*command, "python", "-m", "orchestrator", *words],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    out, asked = "", False
    for line in process.stdout:
        out += line
        if line.startswith("step ") and not asked:
            asked = True
            subprocess.run([ray, "job", "stop", "--no-wait", "by-ray"], cwd=ROOT, env=environment, check=True)
    process.wait(PATIENCE_SECONDS)
    assert "warning: `ray job stop` kills" not in out
    summary = head.file("by_ray", "summary.json")
    assert summary["status"] == "stopped"
    assert summary["checkpoint"].endswith(f"step-{summary['steps']:08d}")


@pytest.mark.slow
def test_ray_s_own_command_refuses_what_the_job_would_lose(head: Head) -> None:
    ray = str(Path(sys.executable).parent / "ray")
    environment = {**head.environment, "RAY_AUTH_MODE": "token", "RAY_ADDRESS": head.url}
    command = [ray, "job", "submit", "--working-dir=.", "--", "python", "-m", "orchestrator"]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    said = unwrapped(done.stdout + done.stderr)
    assert "run.directory=runs is relative" in said
    assert "tracking.uri" in said
    assert "exit code 2" in said
