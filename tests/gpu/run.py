"""All checks on this machine's GPU in one command: a table on the console, all figures in one JSON file.

python -m tests.gpu.run --out gpu-results                 # everything, a few minutes on one GPU
python -m tests.gpu.run --out gpu-results --only speed memory
python -m tests.gpu.run --out /tmp/rehearsal --device cpu # a rehearsal with tiny sizes, measures nothing
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.gpu.checks import CHECKS, Found
from tests.gpu.setting import Setting, setting_of


def main(arguments: list[str] | None = None) -> int:
    """Run the checks; 0 when none found a problem, 1 otherwise, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for results.json and the runs' own folders")
    parser.add_argument("--only", nargs="+", choices=tuple(CHECKS), default=list(CHECKS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    try:
        setting = setting_of(asked.device, asked.out.resolve())
    except (RuntimeError, AssertionError) as error:
        print(str(error).strip().splitlines()[-1], file=sys.stderr)
        print("Rehearse without a GPU: --device cpu", file=sys.stderr)
        return 2
    print(setting.described, flush=True)
    results = {}
    for name in asked.only:
        results[name] = run_check(name, setting)
        print(row(name, results[name]), flush=True)
        # After each, so that what was measured remains if a later one takes the machine down.
        told = {"device": setting.described, "versions": versions(), "checks": results}
        (asked.out / "results.json").write_text(json.dumps(told, indent=1, default=str), encoding="utf-8")
    print("\n".join(summary(results)))
    print(asked.out / "results.json")
    return 1 if any(entry["problems"] for entry in results.values()) else 0


def run_check(name: str, setting: Setting) -> dict[str, Any]:
    """A check's figures, problems and seconds; a check that raises has its traceback as a problem."""
    started = time.monotonic()
    try:
        found = CHECKS[name](setting)
    except Exception:
        found = Found(problems=[traceback.format_exc()])
    return {"figures": found.figures, "problems": found.problems, "seconds": time.monotonic() - started}


def row(name: str, entry: dict[str, Any]) -> str:
    """A check as a line, its problems below it."""
    state = "problem" if entry["problems"] else "ok"
    lines = [f"{name:<16}{state:<9}{entry['seconds']:6.1f} s"]
    lines += [f"    {line}" for problem in entry["problems"] for line in problem.strip().splitlines()[-12:]]
    return "\n".join(lines)


def summary(results: dict[str, Any]) -> list[str]:
    """Speed and memory as tables; nothing of checks that did not run."""
    lines = [""]
    for name, own in results.get("speed", {}).get("figures", {}).items():
        mfu = "not known" if own["mfu"] is None else f"{own['mfu']:.1%}"
        predicted = "none" if own["predicted_step_seconds"] is None else f"{own['predicted_step_seconds']:.3f} s"
        lines.append(
            f"{name:<9} {own['tokens_per_second']:>10,.0f} tokens/s, MFU {mfu}, a step {own['step_seconds']:.3f} s "
            f"(predicted {predicted}), attention: {', '.join(own['attention_kernels'][:2]) or 'not seen'}"
        )
    for name, own in results.get("memory", {}).get("figures", {}).items():
        lines.append(f"\nmemory, {name} (MiB){'planned':>14}{'simulated':>12}{'counted':>12}")
        for category in own["counted"]:
            values = (own[kind].get(category, 0) / 2**20 for kind in ("planned", "simulated", "counted"))
            lines.append(f"  {category:<24}" + "".join(f"{value:>12,.1f}" for value in values))
        if own["allocator_share"] is not None:
            lines.append(
                f"  allocated {own['allocated_peak_bytes'] / 2**20:,.0f}, reserved "
                f"{own['reserved_peak_bytes'] / 2**20:,.0f} (+{own['allocator_share']:.1%}), context "
                f"{own['context_bytes'] / 2**20:,.0f}; planned reserve {own['planned']['reserve'] / 2**20:,.0f}"
            )
    return lines


def versions() -> dict[str, str]:
    """What it ran with."""
    import torch

    return {"torch": torch.__version__, "cuda": str(torch.version.cuda), "python": sys.version.split()[0]}


if __name__ == "__main__":
    sys.exit(main())
