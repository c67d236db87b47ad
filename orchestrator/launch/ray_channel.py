"""A gRPC line to a process of Ray, before or without Ray: encrypted where the cluster is told to be. Imports no ray.

`RAY_USE_TLS=1` makes all of a cluster's processes speak TLS, each with the certificate, key and authority that
`RAY_TLS_SERVER_CERT`, `RAY_TLS_SERVER_KEY` and `RAY_TLS_CA_CERT` name; a plain line to one of them is broken off as if
nobody were there. Next: `knock.py`, `answers.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import grpc

_OPTIONS = (("grpc.enable_http_proxy", 0),)
_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")


def open_channel(address: str) -> grpc.Channel:
    """A line to HOST:PORT, to be closed. Raises OSError when a file of the certificates cannot be read."""
    if not uses_tls(os.environ):
        return grpc.insecure_channel(address, options=_OPTIONS)
    certificate, key, authority = (Path(os.environ.get(name, "")).read_bytes() for name in _FILES)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, key, certificate), options=_OPTIONS)


def uses_tls(environment: Mapping[str, str]) -> bool:
    """Whether Ray's processes speak TLS, as Ray reads it."""
    return environment.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def unreadable_certificates(environment: Mapping[str, str]) -> list[str]:
    """Variables whose file is needed and cannot be read, each with its value."""
    if not uses_tls(environment):
        return []
    named = [(name, environment.get(name, "")) for name in _FILES]
    return [f"{name}={value}" for name, value in named if not _readable(value)]


def _readable(path: str) -> bool:
    return Path(path).is_file() and os.access(path, os.R_OK)
