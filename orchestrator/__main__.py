"""`python -m orchestrator`: see `cli/main.py`."""

from __future__ import annotations

import sys


def _run() -> int:
    try:
        from orchestrator.cli.main import main

        return main()
    except KeyboardInterrupt:
        return 4  # interrupted while modules were still being read


if __name__ == "__main__":
    sys.exit(_run())
