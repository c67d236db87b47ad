"""The lines between driver and supervisors: who is let in, what arrives, who is missed. Loopback sockets, no Ray."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import pytest

from orchestrator.launch.channel import Channel

WAIT_SECONDS = 30.0


@pytest.fixture
def channel() -> Iterator[Channel]:
    channel = Channel("127.0.0.1")
    yield channel
    channel.close()


def test_messages_go_both_ways_and_the_end_of_a_line_is_noticed(channel):
    with Client(channel.address, authkey=channel.key) as supervisor:
        supervisor.send({"kind": "hello"})
        happening = channel.next(WAIT_SECONDS)
        assert (happening.source, happening.body) == ("supervisor", {"kind": "hello"})
        channel.send(happening.line, {"kind": "finish"})
        assert supervisor.recv() == {"kind": "finish"}
    ended = channel.next(WAIT_SECONDS)
    assert (ended.source, ended.line) == ("gone", happening.line)


def test_whoever_lacks_the_key_is_not_heard(channel):
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        Client(channel.address, authkey=b"a guess").recv()
    assert channel.next(0.0) is None


def test_a_stranger_who_says_nothing_keeps_nobody_waiting(channel):
    with socket.create_connection(channel.address), Client(channel.address, authkey=channel.key) as supervisor:
        supervisor.send("let me in")
        assert channel.next(WAIT_SECONDS).body == "let me in"


def test_signals_and_the_end_of_an_attempt_come_through_the_same_queue(channel):
    channel.put("signal", "SIGINT")
    channel.put("attempt", (1, None))
    assert [channel.next(WAIT_SECONDS).source for _ in range(2)] == ["signal", "attempt"]


def test_closing_leaves_no_thread_and_no_port(channel):
    with Client(channel.address, authkey=channel.key) as supervisor:
        supervisor.send("here")
        channel.next(WAIT_SECONDS)
        channel.close()
        with pytest.raises((EOFError, ConnectionResetError)):
            supervisor.recv()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(channel.address)
    assert not [thread for thread in threading.enumerate() if thread.name == "channel-accept"]


def test_sending_to_a_line_that_is_gone_is_no_error(channel):
    channel.send(7, {"kind": "kill"})
