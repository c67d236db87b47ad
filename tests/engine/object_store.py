"""A real S3-speaking server of this machine for tests (moto), which can be told to be busy or to refuse.

`object_store()` starts it and points the environment at it; processes that were forked before need `environment()`.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

BUCKET = "checkpoints"
KEY = "this-key-is-known"


@dataclass
class ObjectStore:
    """The running server."""

    port: int
    faults: list[Callable[[str, str], tuple[int, str] | None]] = field(default_factory=list)
    """Each is asked with (method, path and query) and may answer (status, S3 error code) in the server's place."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Every request: (method, path and query)."""

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}"

    def environment(self) -> dict[str, str]:
        """What a process needs to reach it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """boto3, to look at it or change it behind our back."""
        import boto3

        return boto3.client("s3")

    def answer(self, status: int, code: str, *, method: str, part: str, times: int) -> None:
        """Answer with an error to the next `times` requests of this method whose path or query contains `part`."""
        left = [times]

        def fault(asked: str, path: str) -> tuple[int, str] | None:
            if left[0] and asked == method and part in path:
                left[0] -= 1
                return status, code
            return None

        self.faults.append(fault)

    @contextmanager
    def held(self, part: str, *, carried_out: bool) -> Iterator[threading.Event]:
        """Within the block the next PUT of a path with `part` waits for the block's end; the event says that it waits.

        Then it is carried out or answered with an error.
        """
        waits, ends = threading.Event(), threading.Event()

        def fault(method: str, path: str) -> tuple[int, str] | None:
            if method != "PUT" or part not in path or waits.is_set():
                return None
            waits.set()
            ends.wait(60)
            return None if carried_out else (503, "SlowDown")

        self.faults.append(fault)
        try:
            yield waits
        finally:
            ends.set()

    def application(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """The server's own application behind the faults."""

        def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
            method = environ["REQUEST_METHOD"]
            path = f"{environ['PATH_INFO']}?{environ.get('QUERY_STRING', '')}"
            self.asked.append((method, path))
            if environ.get("CONTENT_LENGTH"):  # here as a whole, whatever becomes of the client meanwhile
                environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            fault = next((found for ask in self.faults if (found := ask(method, path)) is not None), None)
            if KEY not in environ.get("HTTP_AUTHORIZATION", KEY):
                fault = 403, "InvalidAccessKeyId"
            if fault is None:
                return inner(environ, start_response)
            body = f"<?xml version='1.0'?><Error><Code>{fault[1]}</Code><Message>no</Message></Error>".encode()
            start_response(f"{fault[0]} {fault[1]}", [("Content-Type", "application/xml")])
            return [] if method == "HEAD" else [body]

        return serve


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A server with one empty bucket, for the time of the block."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log_request(self, *_: Any) -> None:
            """Nothing on stderr."""

    store = ObjectStore(0)
    application = store.application(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    store.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        with mock.patch.dict(os.environ, store.environment()):
            store.client().create_bucket(Bucket=BUCKET)
            yield store
    finally:
        server.shutdown()
        thread.join()
