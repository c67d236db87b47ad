"""What `cluster=ray` means to a command: the live cluster, asked once however often the configuration is composed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.config.compose import AskCluster
from orchestrator.errors import ConfigError, Problem


def ask_cluster(config_directory: str | None) -> AskCluster:
    """For `examine` and `load_config`; imports Ray only when it is called."""

    def ask(device: str, gpu: str | None) -> Mapping[str, Any]:
        answer = _asked(device, gpu, config_directory)
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    return ask


@cache
def _asked(device: str, gpu: str | None, config_directory: str | None) -> Mapping[str, Any] | ConfigError:
    from orchestrator.launch.survey import live_cluster

    if device not in ("cuda", "cpu"):
        return ConfigError(Problem("cluster.device", f"There is no device `{device}`.", "Use cuda or cpu."))
    directory = Path(config_directory).expanduser().absolute() if config_directory is not None else None
    try:
        return live_cluster("cpu" if device == "cpu" else "cuda", gpu, directory)
    except ConfigError as error:
        return error
