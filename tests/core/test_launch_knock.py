"""An address is judged before Ray is told of it: its form, whether a head answers there, which token it wants."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from orchestrator.errors import RunError
from orchestrator.launch import knock as room
from orchestrator.launch.knock import knock

TOKEN = "a-token-of-the-cluster"


class Head(grpc.GenericRpcHandler):
    """What a head says to `CheckAlive`; with a token when it asks for one."""

    def __init__(self, token: str) -> None:
        self.token = token

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method != room._ALIVE:
            return None
        said = dict(details.invocation_metadata).get("authorization", "")

        def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
            if self.token and said != f"Bearer {self.token}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


def serve(token: str) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((Head(token),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture(scope="module")
def open_head() -> Iterator[str]:
    yield from serve("")


@pytest.fixture(scope="module")
def guarded_head() -> Iterator[str]:
    yield from serve(TOKEN)


@pytest.fixture(autouse=True)
def no_token_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def refusal(address: str) -> str:
    with pytest.raises(RunError) as caught:
        knock(address)
    (problem,) = caught.value.problems
    assert f"RAY_ADDRESS={address}" in problem.message
    return f"{problem.message} -> {problem.fix}"


def test_a_head_that_answers_is_let_pass(open_head: str) -> None:
    knock(open_head)


@pytest.mark.parametrize(
    ("address", "reason", "remedy"),
    [
        ("ray://10.0.0.1:10001", "the address of Ray Client", "submit"),
        ("http://10.0.0.1:8265", "a dashboard's address", "submit --address http://10.0.0.1:8265"),
        ("10.0.0.1", "it is not HOST:PORT", "as in 10.0.0.1:6379"),
        ("head:ssh", "it is not HOST:PORT", "`ray status`"),
        ("::::", "it is not HOST:PORT", "`ray status`"),
        ("10.0.0.1:70000", "70000 is no port", "`ray status`"),
        ("no-such-host.invalid:6379", "nothing answers there", "open its port"),
    ],
)
def test_an_address_of_another_kind_is_refused_with_the_right_one(address: str, reason: str, remedy: str) -> None:
    said = refusal(address)
    assert reason in said
    assert remedy in said


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_port_where_nothing_listens_is_told_at_once(host: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        assert "nothing answers there" in refusal(f"{host}:{unused.getsockname()[1]}")


def test_something_else_that_listens_is_not_taken_for_a_head() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def speak() -> None:
            while not over.is_set():
                line, _ = server.accept()
                line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                line.close()

        speaker = threading.Thread(target=speak, daemon=True)
        speaker.start()
        said = refusal(f"127.0.0.1:{server.getsockname()[1]}")
        over.set()
        socket.create_connection(server.getsockname()).close()
        speaker.join()
    assert "no head of Ray" in said
    assert "8265" in said


def test_a_missing_token_is_named_with_the_ways_to_give_one(guarded_head: str) -> None:
    said = refusal(guarded_head)
    assert "asks for a token and there is none here" in said
    assert "RAY_AUTH_TOKEN_PATH" in said


def test_a_wrong_token_is_named_by_where_it_came_from(guarded_head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    said = refusal(guarded_head)
    assert "does not accept the token from RAY_AUTH_TOKEN" in said
    assert "another" not in said.replace("another version", "")


def test_a_token_that_is_held_back_is_said(guarded_head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    assert "RAY_AUTH_MODE=disabled keeps the one in RAY_AUTH_TOKEN back" in refusal(guarded_head)


def test_a_token_that_lies_ready_is_used_where_it_is_asked_for(
    guarded_head: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(f"{TOKEN}\n")
    monkeypatch.setenv("RAY_AUTH_MODE", "")  # so that what is set here is taken back
    knock(guarded_head)
    assert os.environ["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize("word", ["auto", "local"])
def test_ray_s_own_words_are_left_to_ray(word: str) -> None:
    knock(word)
