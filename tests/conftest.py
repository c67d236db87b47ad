"""For all tests: a property holds or not however busy the machine is, so no example has a time limit."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("without-clock", deadline=None)
settings.load_profile("without-clock")
