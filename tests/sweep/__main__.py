"""``python -m tests.sweep``: which answers hang on which constants; ``--write`` makes the page of it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .jobs import GROUPS, drawn
from .page import page, summary
from .sweep import sweep

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sweep.md"
QUICK = 0.1
"""Part of the cases."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Sweep and print, or write the page; 1 where a moved constant crashes the analysis."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"draw {QUICK:.0%} of the cases")
    parser.add_argument("--part", type=float, help="draw this part of the cases [default: 1]")
    parser.add_argument("--seed", type=int, default=0, help="of the draw [default: 0]")
    parser.add_argument("--only", choices=list(GROUPS), action="append", help="cases of one origin")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.parent.name}/{PAGE.name}")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="processes [default: 2]")
    chosen = parser.parse_args(arguments)
    part = chosen.part or (QUICK if chosen.quick else 1.0)
    cases = [case for case in drawn(part, chosen.seed) if not chosen.only or case[0] in chosen.only]
    began_s, swept = time.monotonic(), []
    for job in sweep(cases, chosen.jobs):
        swept.append(job)
        print(f"{job.job}: {len(job.looked_at)} constants, {len(job.changes)} changes", file=sys.stderr)
    every = "All" if part == 1.0 else f"A random {part:.0%} (seed {chosen.seed}) of the"
    text = page(swept, f"{every} jobs generated near thresholds, those of the net, and the public sets.")
    if chosen.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)
    print(summary(swept), f"{time.monotonic() - began_s:.0f} s", file=sys.stderr)
    return int(any(change.what == "crash" for job in swept for change in job.changes))


if __name__ == "__main__":
    sys.exit(main())
