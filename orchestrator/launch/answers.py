"""Which nodes still answer, asked of their own Ray process. No ray: the addresses come in.

A node that dies without a word counts as alive, and what it held as held, until the head has asked it in vain often
enough: 15 seconds with Ray's settings where its machine still refuses connections, 64 where it says nothing. So a node
that this run may have lost ranks on is asked directly, with the very question that the head asks. Next:
`inventory.py`, which marks the silent ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc

from orchestrator.launch.ray_channel import open_channel

_SECONDS = 2.0
"""How long a node may take to answer; it is asked again at the next look."""
_QUESTION = "/grpc.health.v1.Health/Check"
"""What the head of Ray asks its nodes; pinned by `test_failures_placement.py`."""
_AT_A_TIME = 64
_NOBODY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def silent_nodes(addresses: Mapping[str, str], seconds: float = _SECONDS) -> frozenset[str]:
    """Those of `addresses` (node -> HOST:PORT) that nobody answers for."""
    if not addresses:
        return frozenset()
    with ThreadPoolExecutor(min(_AT_A_TIME, len(addresses))) as asking:
        answered = asking.map(lambda address: _answers(address, seconds), addresses.values())
        return frozenset(node for node, alive in zip(addresses, answered, strict=True) if not alive)


def _answers(address: str, seconds: float) -> bool:
    with open_channel(address) as channel:
        try:
            channel.unary_unary(_QUESTION)(b"", timeout=seconds)
        except grpc.RpcError as error:
            return error.code() not in _NOBODY  # a refusal is an answer
    return True
