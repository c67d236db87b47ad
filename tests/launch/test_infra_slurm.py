"""`infra/slurm.sh` run on this machine with stand-ins for Slurm's two commands: it trains, saves on TERM and asks
for another turn, which continues."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 240
STAND_INS = {
    "srun": '#!/usr/bin/env bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": '#!/usr/bin/env bash\necho "$@" >> "$SHARED/scontrol"\n',
}


def start(shared: Path, *words: str) -> subprocess.Popen[str]:
    (shared / "text").mkdir(exist_ok=True)
    for number in range(40):
        (shared / "text" / f"{number}.txt").write_text(" ".join(str(number * index % 97) for index in range(300)))
    for name, text in STAND_INS.items():
        (shared / "bin").mkdir(exist_ok=True)
        (shared / "bin" / name).write_text(text)
        (shared / "bin" / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "SHARED": str(shared),
        "ENVIRONMENT": str(Path(sys.executable).parents[1]),
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_ID": "42",
        "RAY_PORT": str(port),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "PATH": f"{shared / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    small = [
        "cluster.device=cpu", "model.hidden_size=64", "model.intermediate_size=128", "model.num_hidden_layers=2",
        "model.num_attention_heads=4", "model.max_position_embeddings=64", "training.sequence_length=64",
        "training.global_batch_size=4", "training.micro_batch_size=2", "training.validate_every_steps=0",
        "training.validation_sequences=8", "parallel.data=2", "data=text", f"data.path={shared / 'text'}",
        "data.validation_fraction=0.2", f"data.cache_directory={shared / 'cache'}", "run.name=one",
    ]  # fmt: skip
    return subprocess.Popen(
        ["bash", ROOT / "infra" / "slurm.sh", *small, *words],
        cwd=shared, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_the_script_trains_saves_on_term_and_asks_for_another_turn_that_continues(tmp_path: Path) -> None:
    process = start(tmp_path, "training.steps=100000")
    assert process.stdout is not None
    out, told = "", False
    for line in process.stdout:
        out += line
        if line.startswith("step ") and not told:
            told = True
            process.send_signal(signal.SIGTERM)
        if line.strip() == str(tmp_path / "runs" / "one"):
            break
    assert process.wait(PATIENCE_SECONDS) == 4, out
    assert (tmp_path / "scontrol").read_text() == "requeue 42\n"
    steps = json.loads((tmp_path / "runs" / "one" / "summary.json").read_text())["steps"]
    second = start(tmp_path, f"training.steps={steps + 5}")
    out, _ = second.communicate(timeout=PATIENCE_SECONDS)
    assert second.returncode == 0, out
    summary = json.loads((tmp_path / "runs" / "one" / "summary.json").read_text())
    assert [attempt["cause"] for attempt in summary["attempts"]] == ["stopped", "finished"]
    assert summary["attempts"][1]["first_step"] == steps + 1
