"""Runs the tests of a tier: first in parallel, then one by one those that measure the time of real jobs.

    python -m tests.suite {quick,all,rest,slow} [ARGUMENTS OF PYTEST]

``quick`` is ``make test``; ``all`` adds tests marked ``extended`` or ``alone``; ``rest`` is what ``all`` adds; ``slow`` runs at night.
Both parts run regardless of failures in the first one.

Up to MAX_REPEATED tests that fail in parallel are repeated without other tests, because real jobs of several ranks have deadlines that a
busy machine may miss. A test that passes then is not a failure and is listed at the end as unstable.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_WORKERS = 4
"""Maximum number of workers. Each may start real jobs of several ranks, which have deadlines."""
MAX_REPEATED = 3
"""More failures are not caused by a busy machine: about one in ten runs of 730 extended tests had one such failure."""
FAILED, NO_TESTS = 1, 5
"""Exit codes of pytest if tests failed, and if none was selected."""
TIERS = {
    "quick": ["not slow and not extended and not alone"],
    "all": ["not slow and not alone", "not slow and alone"],
    "rest": ["extended and not slow and not alone", "not slow and alone"],
    "slow": ["slow and not alone", "slow and alone"],
}


def main(arguments: list[str]) -> int:
    """Run the tests of a tier. Returns 0 if all passed."""
    if not arguments or arguments[0] not in TIERS:
        sys.exit(f"usage: python -m tests.suite {{{','.join(TIERS)}}} [ARGUMENTS OF PYTEST]")
    chosen, others = _split_marks(arguments[1:])
    codes: list[int] = []
    unstable: list[str] = []
    begun_s = time.monotonic()
    for marks in TIERS[arguments[0]]:
        side_by_side = [] if marks.endswith(" and alone") else _side_by_side()
        selected = f"({marks}) and ({chosen})" if chosen else marks
        chosen_tests = ["-m", selected, *others]
        codes.append(_pytest("--cache-clear", *chosen_tests, *side_by_side))
        if side_by_side and codes[-1] == FAILED and 0 < len(failed := _last_failed()) <= MAX_REPEATED:
            print("once more, alone:", *failed, sep="\n  ", flush=True)
            codes[-1] = _pytest(*chosen_tests, "--last-failed", "--last-failed-no-failures=none")
            unstable += sorted(set(failed) - set(_last_failed()))
        print(f"{selected}: exit code {codes[-1]}, {(time.monotonic() - begun_s) / 60:.1f} min", flush=True)
    if unstable:
        print("unstable, failed beside others and passed alone:", *unstable, sep="\n  ", flush=True)
    return max((code for code in codes if code != NO_TESTS), default=NO_TESTS)


def _pytest(*arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=ROOT, env=_environment(), check=False).returncode


def _last_failed() -> list[str]:
    """The tests that failed in their last run, from pytest's cache."""
    try:
        return sorted(json.loads((ROOT / ".pytest_cache/v/cache/lastfailed").read_text()))
    except (OSError, ValueError):
        return []


def _environment() -> dict[str, str]:
    """The environment without PYTHONDONTWRITEBYTECODE, so that tests and package are compiled only once."""
    return {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _side_by_side() -> list[str]:
    """Options of pytest-xdist. The tests of a file run in one worker, so that shared recordings are made once."""
    workers = str(min(MAX_WORKERS, len(os.sched_getaffinity(0))))
    return ["-n", workers, "--dist", "loadfile", "--no-loadscope-reorder"]


def _split_marks(arguments: list[str]) -> tuple[str, list[str]]:
    """(Expression after ``-m`` or "", other arguments)."""
    if "-m" not in arguments:
        return "", arguments
    place = arguments.index("-m")
    return arguments[place + 1], arguments[:place] + arguments[place + 2 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
