"""``python -m tests.lab``: the confusion matrix of one run, with fresh seeds."""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .cases import draw
from .slowlink import slow_link_outcome
from .table import print_header, print_row, print_summary
from .trial import Bench, Outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="cases at the same time (they disturb each other)"
    )
    parser.add_argument("--seed", type=int, default=None, help="draws the same cases as an earlier run")
    parser.add_argument("--only", default="", metavar="NAME", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, metavar="F", help="write the outcomes there")
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="folder for the runs [default: a new one]; healthy runs found there are not run again",
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="with --keep and --seed: judge the runs found there, run the others",
    )
    options = parser.parse_args()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    folder = options.keep or Path(tempfile.mkdtemp(prefix="ddpdoctor-lab-"))
    print(f"seed {seed}, runs kept in {folder}", flush=True)
    print_header()
    started = time.monotonic()
    bench = Bench(folder, again=options.again)
    cases = draw(seed, options.only)
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(bench.run, cases):
            outcomes.append(outcome)
            print_row(outcome)
            if options.json:
                options.json.write_text(json.dumps([o.as_json() for o in outcomes], indent=1))
    if options.only in "slow-link":
        for outcome in slow_link_outcome(folder, seed):
            outcomes.append(outcome)
            print_row(outcome)
    print_summary(outcomes, time.monotonic() - started)
    if options.json:
        options.json.write_text(json.dumps([o.as_json() for o in outcomes], indent=1))
    return 0 if all(o.judgement is None or o.judgement.right for o in outcomes if o.counts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
