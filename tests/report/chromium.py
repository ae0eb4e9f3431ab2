"""A real Chromium with the network cut, and what it needs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
SECONDS_MOST = 90


def run(page: Path, *options: str) -> str:
    """Open ``page`` with ``options``; what Chromium prints."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-chromium-", ignore_cleanup_errors=True) as profile:
        command = [PROGRAM, *QUIET, f"--user-data-dir={profile}", *options, page.as_uri()]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS_MOST, check=True
        ).stdout


def axe() -> Path:
    """axe-core's ``axe.min.js``, from the package ``axe-playwright-python`` or named by AXE_CORE; the test is skipped where neither is."""
    package = importlib.util.find_spec("axe_playwright_python")
    beside = Path(package.origin).with_name("axe.min.js") if package and package.origin else None
    found = os.environ.get("AXE_CORE") or beside
    if not found:
        pytest.skip("axe-playwright-python is not installed, and AXE_CORE does not name axe.min.js")
    return Path(found)


def severe(violations: Sequence[Sequence[object]]) -> list[Sequence[object]]:
    """Those of axe's [id, impact, ...] that keep somebody from reading."""
    return [entry for entry in violations if entry[1] in ("serious", "critical", "moderate")]
