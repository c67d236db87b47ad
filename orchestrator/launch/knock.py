"""Whether a Ray cluster answers at an address, lets us in and can be joined from here; asked within seconds.

Ray itself tries a dead address, or one that refuses its token, for minutes and noisily. Its head is asked here over
gRPC, before Ray is imported, because Ray reads its settings then: a token that lies ready is switched on, and loopback
is kept where the head listens there alone. Raises `RunError` with the remedy; next: `session.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

import grpc

from orchestrator.errors import Problem, RunError
from orchestrator.launch.ray_channel import open_channel, unreadable_certificates, uses_tls

_SECONDS = 5.0
"""How long a head may take to accept a connection, and then to answer."""
_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"
"""A call of Ray's head that asks for nothing and changes nothing; pinned by `test_launch_ray_contract.py`."""
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
_HEAD = "RAY_ADDRESS is the head's address, as in 10.0.0.1:6379 (`ray status` on the head names it)."


def knock(address: str) -> None:
    """Return when the head at `address` answers and accepts us. Sets `RAY_AUTH_MODE` where a token lies ready."""
    if address in ("auto", "local"):
        return  # Ray's own words for a cluster of this machine
    host, port = _host_and_port(address)
    _connect(address, host, port)
    if host in _LOOPBACK and not _accepts(own_address(), port):
        # Ray replaces a loopback address by the machine's own, where this head does not listen.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    _ask(address, host, port)


def _host_and_port(address: str) -> tuple[str, int]:
    if address.startswith("ray://"):
        raise _refused(
            address,
            "it is the address of Ray Client, which cannot hold a training",
            f"{_HEAD} From outside the cluster: python -m orchestrator submit",
        )
    if re.match(r"https?://", address):
        raise _refused(
            address,
            "it is a dashboard's address, where jobs are sent",
            f"{_HEAD} To send a job there: python -m orchestrator submit --address {address}",
        )
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal():
        raise _refused(address, "it is not HOST:PORT", _HEAD)
    if not 0 < int(port) <= 65535:
        raise _refused(address, f"{port} is no port", _HEAD)
    return host, int(port)


def _connect(address: str, host: str, port: int) -> None:
    try:
        socket.create_connection((host.strip("[]"), port), timeout=_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise _refused(
            address,
            f"nothing answers there ({error})",
            f"Start the head (`ray start --head`), or open its port to this machine. {_HEAD}",
        ) from error


def _accepts(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=_SECONDS).close()
        return True
    return False


def own_address() -> str:
    """Address of this machine towards other machines; loopback where it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 1))  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def _ask(address: str, host: str, port: int) -> None:
    if missing := unreadable_certificates(os.environ):
        reason = f"RAY_USE_TLS is set, and these certificates cannot be read: {', '.join(missing)}"
        raise _refused(address, reason, "Name readable files, the same authority as the cluster's.")
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    token, source = find_token()
    error = _alive(host, port, token if mode == "token" else "")
    if error is not None and error.code() is grpc.StatusCode.UNAUTHENTICATED and not mode and token:
        error = _alive(host, port, token)
        if error is None:
            os.environ["RAY_AUTH_MODE"] = "token"
    if error is None:
        return
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        raise token_refused(address, mode, token, source)
    raise _refused(
        address,
        f"what answers there is no head of Ray that this version understands ({_one_line(error.details())})",
        f"{_HEAD} It is not the dashboard's port 8265, nor that of Ray Client, 10001. {_tls_hint()}",
    )


def _tls_hint() -> str:
    if uses_tls(os.environ):
        return "RAY_USE_TLS is set here: the head must speak TLS too, with certificates of the same authority."
    return "A cluster that speaks TLS asks for RAY_USE_TLS=1 and its certificates here too."


def _alive(host: str, port: int, token: str) -> grpc.RpcError | None:
    """None when the head says that it is alive; otherwise what the call ended with."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with open_channel(f"{host}:{port}") as channel:
        try:
            channel.unary_unary(_ALIVE)(b"", timeout=_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            return error
    return None


def find_token() -> tuple[str, str]:
    """(token, where it is from) as Ray would read it; two empty texts where there is none."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token, "RAY_AUTH_TOKEN"
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    file = Path(path).expanduser() if path else Path.home() / ".ray" / "auth_token"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if token := file.read_text(encoding="utf-8").strip():
            return token, f"RAY_AUTH_TOKEN_PATH={path}" if path else "~/.ray/auth_token"
    return "", ""


def token_refused(address: str, mode: str, token: str, source: str) -> RunError:
    """What to say when a cluster asks for another token than it was given."""
    give = "RAY_AUTH_MODE=token with RAY_AUTH_TOKEN, or with RAY_AUTH_TOKEN_PATH for a file that holds it"
    fetch = "`ray get-auth-token` on the head prints it"
    if not token:
        return _refused(address, "it asks for a token and there is none here", f"Set {give}; {fetch}.")
    if mode and mode != "token":
        reason = f"it asks for a token, and RAY_AUTH_MODE={mode} keeps the one in {source} back"
        return _refused(address, reason, "Set RAY_AUTH_MODE=token.")
    return _refused(address, f"it does not accept the token from {source}", f"{fetch}. Set {give}.")


def _refused(address: str, reason: str, fix: str) -> RunError:
    return RunError(Problem("", f"the Ray cluster at RAY_ADDRESS={address} cannot be joined: {reason}.", fix))


def _one_line(text: str | None) -> str:
    words = " ".join((text or "no answer").split())
    return words if len(words) <= 120 else f"{words[:117]}..."
