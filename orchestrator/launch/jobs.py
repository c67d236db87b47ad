"""A run as a Ray job: sent to a dashboard, its log followed, stopped, and its exit code brought home.

Speaks with the dashboard over HTTP alone, so it works from outside the cluster. Raises `ConfigError` for an address, a
token or a version that does not serve, within seconds and before anything is sent. `cli/submit.py` is the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import importlib.metadata
import json
import logging
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp

from orchestrator.errors import ConfigError, OrchestratorError, Problem
from orchestrator.launch.knock import find_token, knock, token_refused

EXIT_LINE_VARIABLE = "ORCHESTRATOR_EXIT_LINE"
"""Set for a job: its command then ends with the line below. Ray keeps no exit code of a job that was stopped."""
_EXIT_LINE = re.compile(r"^orchestrator exit code: (\d+)\n?", re.MULTILINE)
_SECONDS = 10.0
_LOST_SECONDS = 120.0
"""How long a dashboard that no longer answers is waited for."""
_AGAIN_SECONDS = 1.0
UNKNOWN = "UNKNOWN"
"""Status of a job whose dashboard was not reached to the end."""
_DEFAULT = "http://127.0.0.1:8265"


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended."""

    status: str
    """Ray's word: SUCCEEDED, FAILED, STOPPED; or `UNKNOWN`."""
    code: int | None
    """Exit code of its command; None: not known."""
    started: bool
    """Whether its command ever ran."""
    message: str


def exit_line(code: int) -> str:
    """The last line of a job's command."""
    return f"orchestrator exit code: {code}"


def find_dashboard(asked: str | None) -> str:
    """URL of the dashboard to send jobs to. Raises `ConfigError` when none answers there, in seconds.

    `asked` is `--address`; then `RAY_API_SERVER_ADDRESS`, `RAY_ADDRESS` and the dashboard of this machine are tried.
    """
    address = asked or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS") or _DEFAULT
    if address.startswith("ray://"):
        raise _refused(address, "it is the address of Ray Client", "Jobs go to the dashboard: http://HEAD:8265.")
    if "://" not in address:
        return _of_head(address)
    url = address.rstrip("/")
    version = _ask_version(url)
    ours = importlib.metadata.version("ray")
    if version.split(".")[:2] != ours.split(".")[:2]:
        raise _refused(
            address,
            f"it runs Ray {version}, and this package needs {ours} there as here",
            "Use one environment on all machines: the same image, or `pip install -c infra/constraints.txt` on each.",
        )
    return url


def _of_head(address: str) -> str:
    """The dashboard of HOST:PORT, which may be the dashboard itself or the head."""
    try:
        return find_dashboard(f"http://{address}")
    except ConfigError as error:
        if isinstance(error.__cause__, urllib.error.HTTPError):
            raise  # a dashboard it is
    try:
        knock(address)
    except OrchestratorError as error:
        raise ConfigError([_as_asked(problem, address) for problem in error.problems]) from error
    from ray.dashboard.utils import get_address_for_submission_client

    os.environ.pop("RAY_API_SERVER_ADDRESS", None)
    os.environ["RAY_ADDRESS"] = address
    return find_dashboard(get_address_for_submission_client(address))


def _as_asked(problem: Problem, address: str) -> Problem:
    """What a head that was knocked at has against it, in the words of the option that named it."""
    if address == os.environ.get("RAY_ADDRESS"):
        return problem
    message = problem.message.replace(f"RAY_ADDRESS={address}", f"--address {address}")
    fix = problem.fix.replace("RAY_ADDRESS is the head's address, as", "The head's address is one as")
    return Problem("--address", message, f"{fix} Jobs are best sent to its dashboard: http://HEAD:8265.")


def _ask_version(url: str) -> str:
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    token, source = find_token()
    try:
        return _get_version(url, token if mode == "token" else "")
    except urllib.error.HTTPError as error:
        if error.code == 401 and not mode and token:
            with contextlib.suppress(urllib.error.HTTPError):
                version = _get_version(url, token)
                os.environ["RAY_AUTH_MODE"] = "token"  # before Ray is imported, which reads it then
                return version
        if error.code in (401, 403):
            raise ConfigError(token_refused(url, mode, token, source).problems) from error
        raise _refused(
            url, f"it answers {error.code}", "Give the address of the dashboard: http://HEAD:8265."
        ) from error
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        reason = str(getattr(error, "reason", error))
        raise _refused(
            url,
            f"no dashboard answers there ({reason if reason.isprintable() else 'what does, speaks no HTTP'})",
            "Start the head with its dashboard (`ray start --head --dashboard-host=0.0.0.0`), or bring it here: "
            "`ssh -L 8265:localhost:8265 HEAD`, `kubectl port-forward`. Name it with --address http://HEAD:8265.",
        ) from error


def _get_version(url: str, token: str) -> str:
    request = urllib.request.Request(f"{url}/api/version")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    # Proxies are for the internet; a cluster's head is reached directly.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_SECONDS) as answer:
        return str(json.load(answer)["ray_version"])


def _refused(address: str, reason: str, fix: str) -> ConfigError:
    return ConfigError(Problem("--address", f"no job can be sent to {address}: {reason}.", fix))


def send(url: str, entrypoint: str, runtime_env: dict[str, Any], name: str) -> tuple[Any, str]:
    """(client, submission id) of a new job. Raises `ConfigError` when the cluster does not take it."""
    from ray.job_submission import JobSubmissionClient

    os.environ.pop("RAY_ADDRESS", None)  # Ray would take it instead of `url`
    os.environ.pop("RAY_API_SERVER_ADDRESS", None)
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "*"
    for handler in logging.getLogger("ray").handlers:  # its loggers have levels of their own
        handler.setLevel(logging.ERROR)
    try:
        client = JobSubmissionClient(url)
        return client, client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env, metadata={"run": name})
    except (RuntimeError, ConnectionError, ValueError, OSError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _refused(url, first, "Look at `ray status` on the head and at its dashboard.") from error


def follow(client: Any, job: str, write: Callable[[str], None], tell: Callable[[str], None]) -> JobEnd:
    """Print a job's log as it comes until the job has ended. SIGINT and SIGTERM stop the job, which saves first; a
    second one raises KeyboardInterrupt and leaves the job as it is."""
    return asyncio.run(_Follower(client, job, write, tell).run())


class _Follower:
    def __init__(self, client: Any, job: str, write: Callable[[str], None], tell: Callable[[str], None]) -> None:
        self._client, self._job, self._write, self._tell = client, job, write, tell
        self._seen = 0
        """Characters of the log that have been written."""
        self._line = ""
        """What of the log's last line has come so far."""
        self._code: int | None = None
        self._started = False
        """Whether Ray has said that it runs the job's command."""
        self._stops = 0
        self._leave: asyncio.Event

    async def run(self) -> JobEnd:
        self._leave = asyncio.Event()
        with self._signals():
            work = asyncio.create_task(self._until_the_end())
            leave = asyncio.create_task(self._leave.wait())
            await asyncio.wait([work, leave], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                raise KeyboardInterrupt
            leave.cancel()
            return await work

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self._stops += 1
        if self._stops > 1:
            self._leave.set()
            return
        self._tell("stopping the job: it saves first (again to leave it to itself)")
        asyncio.get_running_loop().run_in_executor(None, self._ask_to_stop)

    def _ask_to_stop(self) -> None:
        try:
            self._client.stop_job(self._job)
        except (RuntimeError, OSError) as error:
            self._tell(f"the job could not be stopped: {error}")

    async def _until_the_end(self) -> JobEnd:
        lost = 0.0
        while True:
            try:
                await self._tail()
                info = await asyncio.to_thread(self._client.get_job_info, self._job)
                lost = 0.0
            except (RuntimeError, OSError, aiohttp.ClientError) as error:  # requests' errors are OSErrors
                if not lost:
                    self._tell(f"the dashboard does not answer ({error}); the job goes on, trying again")
                lost += _AGAIN_SECONDS
                if lost > _LOST_SECONDS:
                    return JobEnd(UNKNOWN, None, True, f"the dashboard was not reached for {_LOST_SECONDS:g} s")
            else:
                if info.status.is_terminal():
                    self._flush()
                    code = self._code if self._code is not None else info.driver_exit_code
                    started = self._started or info.driver_exit_code is not None
                    return JobEnd(info.status.value, code, started, info.message or "")
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _tail(self) -> None:
        """Follow the log; it always begins at its beginning, so what was written is passed over."""
        passed = 0
        async for text in self._client.tail_job_logs(self._job):
            new = text[max(0, self._seen - passed) :]
            passed += len(text)
            self._seen = max(self._seen, passed)
            if new:
                self._take(new)

    def _take(self, text: str) -> None:
        whole, newline, rest = (self._line + text).rpartition("\n")
        self._line = rest
        for line in (whole + newline).splitlines(keepends=True):
            found = _EXIT_LINE.fullmatch(line)
            if found:
                self._code = int(found[1])
            elif line.startswith(f"Running entrypoint for job {self._job}:"):  # the command itself was said before
                self._started = True
            else:
                self._write(line)

    def _flush(self) -> None:
        if self._line:
            self._take("\n")
