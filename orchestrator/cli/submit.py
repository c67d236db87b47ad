"""`submit`: the same training as a Ray job on a cluster that this machine is no part of.

Everything that can be known here is judged first: the configuration and its plan, places of output that a job would
lose, the address, the size of the upload. Then `launch/jobs.py` sends the job and follows it; its exit code is ours.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from orchestrator.cli.invocation import Invocation
from orchestrator.cli.preflight import RefusedError
from orchestrator.config import job_paths
from orchestrator.config.compose import LIVE_CLUSTER, examine
from orchestrator.config.schema import RunConfig
from orchestrator.errors import ConfigError, Problem
from orchestrator.plan.engine_rules import engine_problems
from orchestrator.plan.make import make_plan
from orchestrator.tracking.identity import problems_of_asked_name

if TYPE_CHECKING:
    from orchestrator.launch.jobs import JobEnd
    from orchestrator.launch.upload import Upload

HELP = """\
python -m orchestrator submit [+experiment=NAME] [GROUP=OPTION ...] [KEY=VALUE ...] [--address URL] [--no-wait]

The same training as a Ray job: uploads the current folder (without what .gitignore and .rayignore name, environments,
runs and caches) and this package, starts `python -m orchestrator train` on the cluster's head, follows its log and ends
with its exit code. Ctrl-C stops the job, which saves first; a second one leaves it to itself.
run.directory must be an absolute path on storage that all nodes share: a job's own folder is deleted after it.

  --address URL     the dashboard, http://HEAD:8265; otherwise RAY_API_SERVER_ADDRESS, RAY_ADDRESS, or this machine's
  --no-wait         print the job's id and return
  --env A,B*        variables to pass on beside NCCL_*, GLOO_*, TORCH_* and MLFLOW_* (as AWS_*); Ray's dashboard shows
                    their values
  --python PATH     the interpreter on the cluster, otherwise `python` (this one, when the cluster is this machine)

Exit code 0: finished; 2: refused; 3: failed; 4: stopped after saving, and the same command continues it.

  python -m orchestrator submit --address http://head:8265 run.directory=/shared/runs
  python -m orchestrator submit +experiment=llama7b_zero2 cluster=ray run.directory=/shared/runs --no-wait
"""

FLAGS = ("--address", "--no-wait", "--env", "--python")
_PASSED_ON = ("NCCL_", "GLOO_", "TORCH_", "MLFLOW_")
_FAILED, _STOPPED, _REFUSED = 3, 4, 2


def run(invocation: Invocation) -> int:
    """Send the job and, unless --no-wait, see it to its end. Raises ConfigError before anything is sent."""
    from orchestrator.launch import jobs

    folder = Path.cwd()
    config, words = _judge(invocation, folder)
    url = jobs.find_dashboard(invocation.options.get("--address"))
    upload = _measured(config, invocation, folder)
    entrypoint = _entrypoint(invocation, words, url)
    with _runtime_env(config, invocation, upload) as runtime_env:
        print(
            f"uploading {upload.folder}: {len(upload.sizes):,} files, {upload.size_bytes / 2**20:.1f} MiB", flush=True
        )
        client, job = jobs.send(url, entrypoint, runtime_env, config.run.name or config.run.experiment)
    print(f"job {job}: {entrypoint}", flush=True)
    stop = f"{_ray()} job stop {job} --address {url}"
    if "--no-wait" in invocation.options:
        print(f"follow it: {_ray()} job logs {job} --follow --address {url}\nstop it, after saving: {stop}", flush=True)
        return 0
    try:
        end = jobs.follow(client, job, _write, lambda text: print(text, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        print(f"left to itself: job {job} is being stopped. At once: {stop}", file=sys.stderr)
        return _STOPPED
    return _exit_code(end, job)


def _ray() -> str:
    """Ray's own command as it can be typed: it does not switch a token on by itself, as we do where one lies ready."""
    return "RAY_AUTH_MODE=token ray" if os.environ.get("RAY_AUTH_MODE") == "token" else "ray"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _judge(invocation: Invocation, folder: Path) -> tuple[RunConfig, list[str]]:
    """(the configuration, the words to send). Raises RefusedError with everything against it."""
    words = list(invocation.overrides)
    asks = f"cluster={LIVE_CLUSTER}" in words
    # The cluster is asked by the job, which is part of it; here any one stands for it and nothing is planned.
    known = [word for word in words if not asks or word != f"cluster={LIVE_CLUSTER}"]
    examined = examine(known, config_directory=invocation.config_directory)
    problems = [*invocation.problems, *examined.problems]
    config = examined.config or examined.remainder()
    if config is not None:
        plan = make_plan(config)
        found = [] if asks else [*plan.problems, *(engine_problems(plan) if plan.feasible else ())]
        found += [*job_paths.output_problems(config), *problems_of_asked_name(config)]
        tracking = job_paths.tracking_in_a_job(config, os.environ)
        if tracking is not None and not job_paths.is_relative(config.run.directory):
            words = [word for word in words if not word.lstrip("+").startswith("tracking.uri=")]
            words.append(f"tracking.uri={tracking}")
            print(f"the MLflow record goes to {tracking}: a job's own folder is deleted after it", flush=True)
        if problems or found:
            raise RefusedError(problems, found) if problems else RefusedError(found)
        return config, words
    raise RefusedError(problems)


def _measured(config: RunConfig, invocation: Invocation, folder: Path) -> Upload:
    """What is sent of the current folder. Raises ConfigError when it is too much, or lacks what the job reads."""
    from orchestrator.launch.upload import measure, size_problem

    upload = measure(folder)
    problems = job_paths.input_problems(config, upload.holds)
    own = invocation.config_directory
    if own is not None and not upload.holds(_below(folder, own) or "//"):
        problems.append(
            Problem(
                "--config-dir",
                f"{own} is not part of the upload of {folder}: the job would not find it.",
                "Submit from a folder above it, and see that no .gitignore leaves it out.",
            )
        )
    size = size_problem(upload)
    if size is not None:
        problems.append(size)
    if problems:
        raise ConfigError(problems)
    return upload


def _below(folder: Path, path: str) -> str | None:
    """`path` relative to `folder`; None when it lies elsewhere."""
    whole = (folder / Path(path).expanduser()).resolve()
    return whole.relative_to(folder.resolve()).as_posix() if whole.is_relative_to(folder.resolve()) else None


def _entrypoint(invocation: Invocation, words: list[str], url: str) -> str:
    python = invocation.options.get("--python") or (sys.executable if _is_this_machine(url) else "python")
    place = []
    if invocation.config_directory is not None:
        place = ["--config-dir", _below(Path.cwd(), invocation.config_directory) or invocation.config_directory]
    return " ".join(map(shlex.quote, [python, "-m", "orchestrator", "train", *words, *place]))


def _is_this_machine(url: str) -> bool:
    from orchestrator.launch.knock import own_address

    try:
        address = socket.gethostbyname(urlsplit(url).hostname or "")
    except OSError:
        return False
    return address.startswith("127.") or address == own_address()


@contextlib.contextmanager
def _runtime_env(config: RunConfig, invocation: Invocation, upload: Upload) -> Iterator[dict[str, Any]]:
    from orchestrator.launch.jobs import EXIT_LINE_VARIABLE
    from orchestrator.launch.upload import package_folder, stage

    named = [name for name in invocation.options.get("--env", "").split(",") if name]
    missing = [pattern for pattern in named if not fnmatch.filter(os.environ, pattern)]
    if missing:
        raise ConfigError(Problem("--env", f"{', '.join(missing)} is not set here.", "Set it, or leave it out."))
    passed_on = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_PASSED_ON) or any(fnmatch.fnmatchcase(name, pattern) for pattern in named)
    }
    environment = {
        **passed_on,
        job_paths.WAIT_VARIABLE: str(job_paths.stop_seconds(config)),
        EXIT_LINE_VARIABLE: "1",
    }
    if package_folder() == upload.folder.resolve():
        yield {"working_dir": str(upload.folder), "excludes": list(upload.excludes), "env_vars": environment}
        return
    with tempfile.TemporaryDirectory() as place:
        stage(upload, Path(place))
        yield {"working_dir": place, "env_vars": environment}


def _exit_code(end: JobEnd, job: str) -> int:
    """The exit code of the training, whatever Ray made of it; says why where it has none."""
    from orchestrator.launch.jobs import UNKNOWN

    if end.code in (0, _REFUSED, _FAILED, _STOPPED):
        return end.code
    if end.status == "STOPPED":
        if not end.started:
            print(f"job {job} was stopped before it began", file=sys.stderr)
            return _STOPPED
        print(f"job {job} was ended before it could say that it had saved", file=sys.stderr)
        return _FAILED
    if end.status == UNKNOWN:
        print(f"{end.message}; job {job} may still run", file=sys.stderr)
        return _FAILED
    reason = " ".join(end.message.splitlines()[:3])
    if not end.started:
        raise ConfigError(Problem("", f"job {job} was not started: {reason}", "Look at its page on the dashboard."))
    hint = " (127: there is no such interpreter there; name one with --python)" if end.code == 127 else ""
    print(f"job {job} ended with {end.code if end.code is not None else end.status}{hint}: {reason}", file=sys.stderr)
    return _FAILED
