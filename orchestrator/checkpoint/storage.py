"""Where checkpoints lie: a folder of files, on a file system or in an object store, with only what checkpoints need.

`open_folder` takes a path or a URL (`s3://bucket/prefix`). `LocalFolder` is here, `ObjectFolder` in
`object_storage.py`; `folder.py` builds on both what is complete and what is a left-over. A file is written through a
`Sink`: what has not been closed does not count, and after `close` it survives a power cut. No torch.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from orchestrator.config.urls import is_url


class StorageError(OSError):
    """A storage does not answer, refuses us, or is of a kind that is not known: what lies there is not known either."""

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        """What the user can change."""

    def __reduce__(self) -> tuple[type[StorageError], tuple[str, str]]:
        return StorageError, (self.message, self.fix)


class Sink(ABC):
    """One file being written from its beginning to its end."""

    @abstractmethod
    def write(self, parts: Sequence[memoryview]) -> None:
        """Append the parts, in order. They must not change before `close`."""

    @abstractmethod
    def close(self) -> None:
        """Finish the file; afterwards it is there to stay. Raises OSError when it cannot be."""

    @abstractmethod
    def discard(self) -> None:
        """Give up: what was written does not count."""


class Folder(ABC):
    """A folder of files and folders."""

    renames: bool
    """Whether a folder gets another name in one step, as a commit on a file system does."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its last part."""

    @abstractmethod
    def __str__(self) -> str:
        """Path or URL."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    @abstractmethod
    def child(self, name: str) -> Folder:
        """The folder of that name in it, there or not."""

    @abstractmethod
    def parent(self) -> Folder:
        """The folder that it is in."""

    @abstractmethod
    def make(self) -> None:
        """Make it. Raises FileExistsError where it can be known that it is there already."""

    @abstractmethod
    def folders(self) -> list[str]:
        """Names of the folders in it; none where there is no such folder."""

    @abstractmethod
    def files(self) -> dict[str, int]:
        """Size in bytes of every file below it, by path with forward slashes; none where there is no such folder."""

    @abstractmethod
    def size_bytes(self, name: str) -> int:
        """Size of one file. Raises FileNotFoundError."""

    @abstractmethod
    def modified(self) -> float:
        """`time.time()` of its newest change; 0 when it is not there."""

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """A file to be read, forwards or at any place. Raises FileNotFoundError."""

    @abstractmethod
    def create(self, name: str, size_bytes: int = 0) -> Sink:
        """A new file; `size_bytes` is how long it will be at least."""

    @abstractmethod
    def write_whole(self, name: str, data: bytes) -> None:
        """Write a small file for good. Readers see all of it or, until then, what was there before."""

    @abstractmethod
    def remove(self) -> None:
        """Delete it and all in it, as far as that goes; nothing is raised for what is gone already."""

    @abstractmethod
    def remove_file(self, name: str) -> None:
        """Delete one file. Raises FileNotFoundError where it can be known that it is not there."""

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        try:
            self.size_bytes(name)
        except FileNotFoundError:
            return False
        return True

    def identity(self) -> str:
        """The same text for the same folder, however it was written."""
        return str(self)

    def forget_unfinished(self) -> None:  # noqa: B027
        """Drop what unfinished uploads below it have left in the storage where nobody sees it."""

    def read(self, name: str) -> bytes:
        """A small file. Raises FileNotFoundError."""
        with self.open(name) as stream:
            return stream.read()


class LocalFolder(Folder):
    """A folder on a file system, local or shared by all nodes."""

    renames = True

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """See `Folder`."""
        return self.path.name

    def __str__(self) -> str:
        return str(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    def child(self, name: str) -> LocalFolder:
        """See `Folder`."""
        return LocalFolder(self.path / name)

    def parent(self) -> LocalFolder:
        """See `Folder`."""
        return LocalFolder(self.path.parent)

    def make(self) -> None:
        """See `Folder`."""
        self.path.mkdir(parents=True)

    def folders(self) -> list[str]:
        """See `Folder`."""
        try:
            return [entry.name for entry in os.scandir(self.path) if entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def files(self) -> dict[str, int]:
        """See `Folder`."""
        found = {}
        for root, _, names in os.walk(self.path):
            for name in names:
                path = Path(root) / name
                try:
                    found[path.relative_to(self.path).as_posix()] = path.stat().st_size
                except FileNotFoundError:
                    continue  # It went, or got another name, while we looked.
        return found

    def size_bytes(self, name: str) -> int:
        """See `Folder`."""
        return (self.path / name).stat().st_size

    def has(self, name: str) -> bool:
        """See `Folder`."""
        return (self.path / name).is_file()

    def modified(self) -> float:
        """See `Folder`."""
        try:
            return self.path.stat().st_mtime
        except FileNotFoundError:
            return 0.0  # It went, or got another name, since it was listed.

    def open(self, name: str) -> BinaryIO:
        """See `Folder`."""
        return (self.path / name).open("rb", buffering=0)

    def create(self, name: str, size_bytes: int = 0) -> Sink:
        """See `Folder`."""
        return LocalSink(self.path / name, size_bytes)

    def write_whole(self, name: str, data: bytes) -> None:
        """See `Folder`."""
        temporary = self.path / f".{name}.{uuid.uuid4().hex[:8]}"
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(self.path / name)
        self.sync()

    def remove(self) -> None:
        """See `Folder`."""
        if self.path.is_symlink():
            self.path.unlink(missing_ok=True)  # What it leads to is not ours.
            return
        shutil.rmtree(self.path, ignore_errors=True)

    def remove_file(self, name: str) -> None:
        """See `Folder`."""
        (self.path / name).unlink()

    def identity(self) -> str:
        """See `Folder`."""
        return str(self.path.resolve())

    def rename(self, name: str) -> LocalFolder:
        """Give it another name in the same folder, in one step, to stay."""
        target = self.path.with_name(name)
        self.path.rename(target)
        LocalFolder(target.parent).sync()
        return LocalFolder(target)

    def sync(self) -> None:
        """Make names created in or moved into it survive a power cut."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class LocalSink(Sink):
    """A new file on a file system, written in few large pieces that begin their way to the disk at once."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        self._written = 0
        self._on_its_way = 0
        if size_bytes:
            self._reserve(size_bytes)

    def _reserve(self, size_bytes: int) -> None:
        """Room for all of it at once: a full disk is known before the first byte, and the file lies in one piece."""
        try:
            _reserve(self._descriptor, size_bytes)
        except OSError as error:
            self.discard()
            raise OSError(error.errno, f"{error.strerror}: no room for {size_bytes} bytes", str(self._path)) from None

    def write(self, parts: Sequence[memoryview]) -> None:
        """See `Sink`."""
        left = list(parts)
        while left:
            done = os.writev(self._descriptor, left[:_PARTS_AT_ONCE])
            self._written += done
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if left and done:
                left[0] = left[0][done:]
        # Written pages are not read again: let the disk begin with them now rather than all at once at the end.
        if self._written - self._on_its_way >= _SENT_BYTES:
            begin, self._on_its_way = self._on_its_way, self._written
            os.posix_fadvise(self._descriptor, begin, self._written - begin, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """See `Sink`."""
        try:
            os.ftruncate(self._descriptor, self._written)
            os.fsync(self._descriptor)
        except OSError:
            self.discard()
            raise
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def discard(self) -> None:
        """See `Sink`."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
        self._path.unlink(missing_ok=True)


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Allocate a file's room where the file system can.

    The C library's `posix_fallocate` writes into every block of a file where it cannot (NFS before 4.2): `fallocate`
    says so instead. Raises OSError when there is no room.
    """
    number = ctypes.c_longlong
    if _C_LIBRARY.fallocate(descriptor, 0, number(0), number(size_bytes)):
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code))


_C_LIBRARY = ctypes.CDLL(None, use_errno=True)
_SENT_BYTES = 8 << 20
"""Few and large pieces are what a disk is fast with."""
_PARTS_AT_ONCE = 512
"""Below the 1,024 that Linux takes in one call."""


def open_folder(location: str | os.PathLike[str] | Folder) -> Folder:
    """The folder at a path or URL, there or not.

    Raises:
        StorageError: the URL is of a kind that is not known here, or its package is missing.
    """
    if isinstance(location, Folder):
        return location
    if is_url(os.fspath(location)):
        from orchestrator.checkpoint.object_storage import ObjectFolder

        return ObjectFolder.of(os.fspath(location))
    return LocalFolder(Path(location))


def read_at(stream: BinaryIO, place: int, buffer: memoryview) -> int:
    """Fill a buffer from a place of a file until it is full or the file ends; returns the bytes read.

    One call gives at most 2 GiB, and from a network less.
    """
    stream.seek(place)
    done = 0
    while done < len(buffer):
        count = stream.readinto(buffer[done:])  # type: ignore[attr-defined]
        if not count:
            break
        done += count
    return done
