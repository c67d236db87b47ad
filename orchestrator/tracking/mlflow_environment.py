"""How every process of ours speaks with MLflow: what it finds in its environment, and its errors in few words."""

from __future__ import annotations

import os
import re

_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "OMP_NUM_THREADS": "1",
}
"""We try again ourselves, so that a process can end within its time."""


def set_up_environment() -> None:
    """Set what is not set; before MLflow is imported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def in_words(error: BaseException) -> str:
    """What went wrong, without the layers that each repeat the address."""
    text = next(iter(str(error).splitlines()), type(error).__name__)
    cause = re.search(r"\[Errno -?\d+\] [^\"')]+", text)
    return cause.group() if cause and "Max retries exceeded" in text else text
