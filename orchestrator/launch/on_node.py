"""What a node says of itself: versions, our code, memory, GPUs and who holds them, which paths it sees.

Sent to nodes by value (`probe.py`), so that one without this package answers as well: imports nothing of ours, and
beyond the standard library only what Ray itself brings along, where it is used.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import time
from typing import Any


def answer(packages: tuple[str, ...], known: tuple[str, ...], fresh: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Everything, as plain values. `fresh` paths were written a moment ago: they are looked for for `seconds`."""
    deadline = time.monotonic() + seconds
    fingerprint, place = code()
    return {
        "versions": versions(packages),
        "code": fingerprint,
        "code_place": place,
        "memory_bytes": memory_bytes(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpus(),
        "sees": {path: pathlib.Path(path).exists() for path in known} | {path: seen(path, deadline) for path in fresh},
    }


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Version of Python and of each distribution that is installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def code() -> tuple[str, str]:
    """(fingerprint of our source files, their place); (empty, reason) where they are not found."""
    digest = hashlib.sha256()
    place = ""
    for package in ("orchestrator", "models"):
        try:
            found = importlib.util.find_spec(package)
        except (ImportError, ValueError) as error:
            return "", str(error)
        if found is None or not found.origin:
            return "", f"there is no package `{package}`"
        root = pathlib.Path(found.origin).parent
        for file in sorted(root.rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
        place = place or str(root)
    return digest.hexdigest()[:16], place


def memory_bytes() -> int:
    """Memory of the machine, or of the container where it may use less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = pathlib.Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else ""
    return min(total, int(text)) if text.isdigit() else total


def seen(path: str, deadline: float) -> bool:
    """Whether a path comes into sight before `deadline`; network file systems show a new file a little later."""
    while not (found := pathlib.Path(path).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def gpus() -> list[dict[str, Any]]:
    """All GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says; none where no NVIDIA driver answers."""
    import ray._private.thirdparty.pynvml

    nvml: Any = ray._private.thirdparty.pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        return [gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


def gpu(nvml: Any, index: int) -> dict[str, Any]:
    """One GPU: name, memory, and the processes that compute on it."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
    return {
        "index": index,
        "uuid": str(uuid.decode() if isinstance(uuid, bytes) else uuid),
        "name": name.decode() if isinstance(name, bytes) else str(name),
        "memory_bytes": int(memory.total),
        "used_bytes": int(memory.used),
        "holders": [
            (int(holder.pid), process_name(int(holder.pid)), int(holder.usedGpuMemory or 0))
            for holder in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        ],
    }


def process_name(pid: int) -> str:
    """What a process is called, where this one may look."""
    try:
        return pathlib.Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return "not visible from here"
