"""Which tests come first; recordings that many tests read; the last lines of a run."""

from __future__ import annotations

import fcntl
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SLOWEST_S = 15.0
"""No test of ``make test`` takes longer on two idle cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real jobs come first, so that no worker is left with a long one when the others have nothing to do."""
    items.sort(key=lambda item: item.get_closest_marker("torchrun") is None)


Once = Callable[[str, Callable[[Path], object]], Path]
"""``once(name, make)``: the folder that ``make`` has filled, by one worker of a run of pytest, for all. To be read only."""


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Once:
    """What is costly to make, such as a recording, made once in a run of pytest, whichever worker needs it first."""
    base = tmp_path_factory.getbasetemp()
    common = (base.parent if hasattr(request.config, "workerinput") else base) / "once"
    common.mkdir(exist_ok=True)

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = common / name, common / f"{name}.done"
        with open(common / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return made


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What was skipped, and why, by folder; tests that take too long for ``make test``."""
    skipped: Counter[tuple[str, str]] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skipped["/".join(report.nodeid.split("/")[:2]).partition("::")[0], why.removeprefix("Skipped: ")] += 1
    for (place, why), count in sorted(skipped.items()):
        terminalreporter.write_line(f"skipped {count:4d}  {place}: {why[:100]}")
    ended = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.duration > SLOWEST_S
    ]
    for report in sorted(ended, key=lambda each: -each.duration):
        terminalreporter.write_line(f"took {report.duration:4.0f} s  {report.nodeid} {report.when}")
