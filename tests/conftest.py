"""For all tests: a property holds or not however busy the machine is, so no example has a time limit.

Tests of launching make pytest's own process a driver of Ray; it ends like a command that was one.
"""

from __future__ import annotations

from orchestrator.cli.leaving import Leaving

_LEAVING = Leaving()

import pytest  # noqa: E402 - after what is to have the last word
from hypothesis import settings  # noqa: E402

settings.register_profile("without-clock", deadline=None)
settings.load_profile("without-clock")


def pytest_sessionfinish(exitstatus: int | pytest.ExitCode) -> None:
    _LEAVING.with_code(int(exitstatus))
