"""Runs the tests: side by side those that may, then alone those that measure where a real job's time goes.

    python -m tests.suite [ARGUMENTS OF PYTEST]

At its end it lists what was skipped, and why. Both goes run whatever the first one finds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
MOST_WORKERS = 4
"""Each may start real jobs of several ranks, which have deadlines."""
NO_TESTS = 5
"""pytest's exit code where none was chosen."""


def main(arguments: list[str]) -> int:
    """The exit code: 0 where all tests passed."""
    chosen, arguments = _without_marks(arguments)
    workers = ["-n", str(min(MOST_WORKERS, len(os.sched_getaffinity(0)))), "--dist", "loadgroup"]
    codes: list[int] = []
    skipped: Counter[tuple[str, str]] = Counter()
    begun_s = time.monotonic()
    for which, options in (("not alone", workers), ("alone", [])):
        marks = f"({chosen}) and {which}" if chosen else which
        code, skips = _go(marks, [*options, *arguments])
        codes.append(code)
        skipped += skips
        print(
            f"Tests that are {marks}: exit code {code}, {(time.monotonic() - begun_s) / 60:.1f} min so far",
            flush=True,
        )
    _tell(skipped)
    return max((code for code in codes if code != NO_TESTS), default=NO_TESTS)


def _without_marks(arguments: list[str]) -> tuple[str, list[str]]:
    """The expression after ``-m``, empty where there is none, and the other arguments."""
    if "-m" not in arguments:
        return "", arguments
    place = arguments.index("-m")
    return arguments[place + 1], arguments[:place] + arguments[place + 2 :]


def _go(marks: str, options: list[str]) -> tuple[int, Counter[tuple[str, str]]]:
    """pytest's exit code, and how many tests of a file it skipped for what reason."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", marks, f"--junitxml={report}", *options]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        skips = [
            (case.get("classname", ""), skip.get("message", ""))
            for case in cases
            for skip in case.iter("skipped")
            if skip.get("type") == "pytest.skip"
        ]
    return code, Counter(skips)


def _tell(skipped: Counter[tuple[str, str]]) -> None:
    print(f"\nSkipped here: {skipped.total() or 'nothing'}")
    for (place, why), count in sorted(skipped.items()):
        print(f"{count:5d}  {place}: {why}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
