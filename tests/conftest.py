"""Order of the tests, shared recordings, and the summary at the end of a run."""

from __future__ import annotations

import fcntl
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SLOWEST_S = 15.0
"""Maximum duration of a test in ``make test`` on two idle cores."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run real jobs first, so that no worker runs a long test while the others are idle."""
    items.sort(key=lambda item: item.get_closest_marker("torchrun") is None)


Once = Callable[[str, Callable[[Path], object]], Path]
"""``once(name, make)``: a folder that ``make`` has filled once per run of pytest, for all workers. Do not write to it."""


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Once:
    """Makes expensive data, such as recordings, once per run of pytest, in the first worker that needs them."""
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
    """Print the skipped tests with their reasons by folder, and the tests that take too long for ``make test``."""
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
