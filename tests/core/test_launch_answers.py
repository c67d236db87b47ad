"""Which nodes answer: asked of servers that do, refuse, say nothing or are not there. Loopback sockets, no Ray."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from orchestrator.launch.answers import silent_nodes

SERVING = b"\x08\x01"


class _Node(grpc.GenericRpcHandler):
    """What a raylet is to whoever asks: one service, with or without an answer."""

    def __init__(self, answer: Callable[[bytes, Any], bytes] | None) -> None:
        self._answer = answer

    def service(self, handler_call_details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._answer) if self._answer else None


def refuses(request: bytes, context: Any) -> bytes:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "it asks for a token")
    raise AssertionError("abort raises")


@pytest.fixture
def listen() -> Iterator[Callable[..., str]]:
    with ExitStack() as stack:

        def start(answer: Callable[[bytes, Any], bytes] | None, address: str = "127.0.0.1:0") -> str:
            server = grpc.server(ThreadPoolExecutor(1))
            server.add_generic_rpc_handlers((_Node(answer),))
            port = server.add_insecure_port(address)
            server.start()
            stack.callback(lambda: server.stop(None).wait())
            return f"127.0.0.1:{port}"

        yield start


@pytest.fixture
def mute() -> Iterator[str]:
    """Accepts connections and says nothing, as a process that is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def nobody() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_node_whose_process_is_gone_or_says_nothing_is_silent(listen, mute: str) -> None:
    asked = {"alive": listen(lambda request, context: SERVING), "gone": nobody(), "mute": mute}
    assert silent_nodes(asked, seconds=0.5) == {"gone", "mute"}


def test_who_refuses_to_say_is_there(listen) -> None:
    assert silent_nodes({"guarded": listen(refuses), "another": listen(None)}) == frozenset()


def test_nobody_is_asked_when_nobody_is_in_doubt() -> None:
    assert silent_nodes({}) == frozenset()


def test_a_node_that_comes_back_at_its_address_answers_again(listen) -> None:
    address = nobody()
    assert silent_nodes({"back": address}) == {"back"}
    assert listen(lambda request, context: SERVING, address) == address
    assert silent_nodes({"back": address}) == frozenset()
