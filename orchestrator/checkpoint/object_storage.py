"""Checkpoints in an object store, through fsspec: `s3://bucket/prefix`. No torch.

Nothing there can be renamed and a file is there as a whole or not at all, so `folder.py` commits by a manifest. Every
failure of the store is a `StorageError` that says what to change; what may pass by itself (a server that is busy or not
reachable for a moment) is tried again for `PATIENCE_SECONDS`. Credentials and endpoint come from the environment as for
every AWS tool (`AWS_ACCESS_KEY_ID`, `AWS_PROFILE`, `AWS_ENDPOINT_URL` …) and are written nowhere.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any, BinaryIO, TypeVar, cast

from orchestrator.checkpoint.storage import Folder, Sink, StorageError
from orchestrator.config.urls import PACKAGES, URL_MARK, url_problem

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""How long something that may pass by itself is tried again, unless `hurried`."""
_patience: ContextVar[float] = ContextVar("patience", default=PATIENCE_SECONDS)
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0
_PART_BYTES = 32 << 20
"""Of an upload, and the most that is read ahead; a file of 10,000 parts, the most that S3 takes, has 312 GiB."""
_FIRST_AHEAD_BYTES = 256 << 10
"""Read ahead at a new place; twice as much each time that the reader goes on from there."""


class BusyError(StorageError):
    """Something that may pass by itself."""


def missing_package(scheme: str) -> tuple[str, str] | None:
    """(which package is not installed, how to install it) for URLs of this kind; None: it is there."""
    package = PACKAGES[scheme]
    if find_spec(package) is not None:
        return None
    return f"{scheme}:// needs the package {package}, which is not installed", f"pip install '{package}'"


@contextmanager
def hurried(seconds: float) -> Iterator[None]:
    """Within the block nothing is tried again for longer than this: for a look before anything starts.

    An inner block counts instead of the outer one.
    """
    token = _patience.set(seconds)
    try:
        yield
    finally:
        _patience.reset(token)


@cache
def _file_system(scheme: str, process: int, settings: tuple[tuple[str, str], ...]) -> Any:
    """One connection pool a process, as a forked one must not use its parent's, and for the server and credentials
    that the environment names now."""
    import fsspec

    # One try each: `_ask` alone knows how long it is worth waiting. Their tries in each of ours made every no last.
    waits = {"connect_timeout": 5, "read_timeout": 60, "retries": {"total_max_attempts": 1, "mode": "standard"}}
    found = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, config_kwargs=waits)
    found.retries = 1
    return found


def _settings() -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_")))


class ObjectFolder(Folder):
    """What begins with a URL and a slash."""

    renames = False

    def __init__(self, scheme: str, key: str) -> None:
        self._scheme = scheme
        self._key = key.strip("/")

    @staticmethod
    def of(url: str) -> ObjectFolder:
        """The folder at a URL.

        Raises:
            StorageError: such a URL cannot be used, or the package for it is missing.
        """
        scheme, _, key = url.partition(URL_MARK)
        if (problem := url_problem(url) or missing_package(scheme)) is not None:
            raise StorageError(f"{url}: {problem[0]}", problem[1])
        return ObjectFolder(scheme, key)

    @property
    def name(self) -> str:
        """See `Folder`."""
        return self._key.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self._scheme}{URL_MARK}{self._key}"

    def child(self, name: str) -> ObjectFolder:
        """See `Folder`."""
        return ObjectFolder(self._scheme, f"{self._key}/{name}")

    def parent(self) -> ObjectFolder:
        """See `Folder`."""
        return ObjectFolder(self._scheme, self._key.rpartition("/")[0])

    def make(self) -> None:
        """See `Folder`: here it is made by the first file in it."""

    def folders(self) -> list[str]:
        """See `Folder`."""
        entries = self._listed(lambda store: store.ls(self._key, detail=True))
        return [_last(entry["name"]) for entry in entries if entry["type"] == "directory"]

    def files(self) -> dict[str, int]:
        """See `Folder`."""
        found = self._listed(lambda store: store.find(self._key, detail=True).values())
        beginning = f"{self._key}/"
        return {entry["name"].removeprefix(beginning): entry["size"] for entry in found if entry["type"] == "file"}

    def _listed(self, look: Callable[[Any], Any]) -> list[dict[str, Any]]:
        try:
            return list(self._ask("list", look))
        except FileNotFoundError:
            # A prefix without objects is an empty folder; a bucket that is not there is a mistake.
            bucket = self._key.partition("/")[0]
            if not self._ask("list", lambda store: store.exists(bucket)):
                fix = f"Make the bucket or name another; the server is {_endpoint()}."
                raise StorageError(f"{self}: there is no bucket {bucket!r}", fix) from None
            return []

    def size_bytes(self, name: str) -> int:
        """See `Folder`."""
        return int(self._ask("look at", lambda store: store.info(f"{self._key}/{name}"))["size"])

    def modified(self) -> float:
        """See `Folder`."""
        times = [
            entry["LastModified"] for entry in self._listed(lambda store: store.find(self._key, detail=True).values())
        ]
        return max((when.timestamp() for when in times), default=0.0)

    def open(self, name: str) -> BinaryIO:
        """See `Folder`."""
        key = f"{self._key}/{name}"
        return cast(BinaryIO, _Reading(self, key))

    def read(self, name: str) -> bytes:
        """See `Folder`."""
        return cast(bytes, self._ask("read", lambda store: store.cat_file(f"{self._key}/{name}")))

    def create(self, name: str, size_bytes: int = 0) -> Sink:
        """See `Folder`."""
        return ObjectSink(self, f"{self._key}/{name}")

    def write_whole(self, name: str, data: bytes) -> None:
        """See `Folder`."""
        self._ask("write", lambda store: store.pipe_file(f"{self._key}/{name}", data))

    def remove(self) -> None:
        """See `Folder`."""
        try:
            self._ask("delete", lambda store: store.rm(self._key, recursive=True))
        except FileNotFoundError:
            return

    def remove_file(self, name: str) -> None:
        """See `Folder`."""
        self._ask("delete", lambda store: store.rm_file(f"{self._key}/{name}"))

    def forget_unfinished(self) -> None:
        """See `Folder`: parts of uploads that were never completed are paid for and not listed."""
        bucket, _, prefix = self._key.partition("/")

        def abort_all(store: Any) -> None:
            for upload in store.list_multipart_uploads(bucket):
                if upload["Key"].startswith(f"{prefix}/"):
                    store.call_s3(
                        "abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )

        try:
            self._ask("clean up", abort_all)
        except OSError as error:
            # Not everybody may list uploads; a life-cycle rule of the bucket does the same.
            _LOG.info("Unfinished uploads below %s stay (%s).", self, error)

    def _ask(self, what: str, action: Callable[[Any], T]) -> T:
        """Do something with the store, again and again as long as that can help.

        Raises FileNotFoundError as such and everything else as StorageError.
        """
        deadline = time.monotonic() + _patience.get()
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return action(_file_system(self._scheme, os.getpid(), _settings()))
            except FileNotFoundError:
                raise
            except Exception as reason:
                error = reason if isinstance(reason, StorageError) else _explained(reason, what, str(self))
                if not isinstance(error, BusyError) or time.monotonic() + pause > deadline:
                    raise error from reason
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


class _Reading:
    """A file of an object store as a stream, read ahead the further the longer it is read from front to back."""

    def __init__(self, folder: ObjectFolder, key: str) -> None:
        self._folder = folder
        self._key = key
        self._size = int(folder._ask("read", lambda store: store.info(key))["size"])
        self._position = 0
        self._begin = 0
        self._ahead = b""
        self._ahead_bytes = _FIRST_AHEAD_BYTES

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is held open; what was read ahead is dropped."""
        self._ahead = b""

    def seek(self, position: int) -> int:
        """Go on from a place."""
        self._position = position
        return position

    def tell(self) -> int:
        """Where it stands."""
        return self._position

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer as far as the file goes; returns the bytes read, 0 at the end."""
        view = memoryview(buffer).cast("B")
        wanted = min(len(view), self._size - self._position)
        done = 0
        while done < wanted:
            at = self._position + done - self._begin
            if not 0 <= at < len(self._ahead):
                self._fetch(self._position + done, wanted - done)
                continue
            piece = self._ahead[at : at + wanted - done]
            view[done : done + len(piece)] = piece
            done += len(piece)
        self._position += done
        return done

    def read(self, size: int = -1) -> bytes:
        """The next bytes, all of them by default."""
        left = self._size - self._position
        buffer = bytearray(left if size < 0 else min(size, left))
        self.readinto(memoryview(buffer))
        return bytes(buffer)

    def _fetch(self, begin: int, wanted: int) -> None:
        goes_on = bool(self._ahead) and begin == self._begin + len(self._ahead)
        self._ahead_bytes = min(2 * self._ahead_bytes, _PART_BYTES) if goes_on else _FIRST_AHEAD_BYTES
        end = min(self._size, begin + min(max(wanted, self._ahead_bytes), _PART_BYTES))
        self._ahead = b""
        self._ahead = self._folder._ask("read", lambda store: store.cat_file(self._key, start=begin, end=end))
        self._begin = begin
        if not self._ahead:
            raise StorageError(f"{self._key} ended before its {self._size} bytes were read")


class ObjectSink(Sink):
    """One object, uploaded in parts; it is not there until the upload is completed."""

    def __init__(self, folder: ObjectFolder, key: str) -> None:
        self._folder = folder
        self._key = key
        self._upload: dict[str, Any] | None = None
        self._parts: list[dict[str, Any]] = []
        self._pending = bytearray()

    def write(self, parts: Sequence[memoryview]) -> None:
        """See `Sink`."""
        for part in parts:
            rest = part
            while len(rest):
                room = _PART_BYTES - len(self._pending)
                self._pending += rest[:room]
                rest = rest[room:]
                if len(self._pending) == _PART_BYTES:
                    self._send()

    def _names(self) -> dict[str, str]:
        bucket, _, key = self._key.partition("/")
        return {"Bucket": bucket, "Key": key}

    def _send(self) -> None:
        """One part; the same part again is the same part, so a retry does no harm."""
        names, data = self._names(), bytes(self._pending)
        if self._upload is None:
            made = self._folder._ask("write", lambda store: store.call_s3("create_multipart_upload", **names))
            self._upload = {"UploadId": made["UploadId"], **names}
        upload, number = self._upload, len(self._parts) + 1
        sent = self._folder._ask(
            "write", lambda store: store.call_s3("upload_part", **upload, PartNumber=number, Body=data)
        )
        self._parts.append({"PartNumber": number, "ETag": sent["ETag"]})
        self._pending.clear()

    def close(self) -> None:
        """See `Sink`."""
        if self._upload is None:
            data = bytes(self._pending)
            self._folder._ask("write", lambda store: store.pipe_file(self._key, data))
            return
        if self._pending:
            self._send()
        upload, done = self._upload, {"Parts": self._parts}
        try:
            self._folder._ask(
                "write", lambda store: store.call_s3("complete_multipart_upload", **upload, MultipartUpload=done)
            )
        except FileNotFoundError:
            # The upload is gone: an earlier try may have completed it, and its answer got lost.
            if not self._folder._ask("look at", lambda store: store.exists(self._key)):
                raise
        self._upload = None

    def discard(self) -> None:
        """See `Sink`."""
        if self._upload is not None:
            upload, self._upload = self._upload, None
            try:
                self._folder._ask("clean up", lambda store: store.call_s3("abort_multipart_upload", **upload))
            except OSError as error:
                _LOG.info("An unfinished upload of %s stays (%s).", self._key, error)


def _last(key: str) -> str:
    return key.rstrip("/").rpartition("/")[2]


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "AWS"


_CREDENTIALS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
_REFUSED = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "Forbidden", "ExpiredToken", "InvalidToken")
_LASTING = ("NoSuchBucket", "InvalidBucketName", "EntityTooLarge", "PermanentRedirect", "InvalidArgument")


def _explained(error: Exception, what: str, url: str) -> StorageError:
    """What a failure of the store means for whoever waits for it."""
    kind = type(error).__name__
    text = f"{kind}: {error}".rstrip(": ")
    failed = f"could not {what} {url}"
    if kind in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError"):
        return StorageError(f"{failed}: no usable AWS credentials were found ({error})", f"Set {_CREDENTIALS}.")
    if isinstance(error, PermissionError) or any(word in text for word in _REFUSED):
        fix = (
            f"Check {_CREDENTIALS}, and that they may list, read, write and delete there; the server is {_endpoint()}."
        )
        return StorageError(f"{failed}: the store refuses our credentials ({text})", fix)
    if any(word in kind for word in ("Connect", "Endpoint", "Timeout", "HTTPClient", "Connection")):
        fix = f"Check the network and AWS_ENDPOINT_URL (now {_endpoint()})."
        return BusyError(f"{failed}: the server {_endpoint()} does not answer ({text})", fix)
    if isinstance(error, ValueError | TypeError | KeyError) or any(word in text for word in _LASTING):
        return StorageError(f"{failed} ({text})", "Check bucket, prefix and endpoint.")
    return BusyError(f"{failed} ({text})", f"The server is {_endpoint()}.")
