"""A real Chromium with the network cut: screenshots and the document as the browser built it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DARK = "--blink-settings=preferredColorScheme=0"
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


def run(page: Path, *options: str, javascript: bool = True) -> str:
    """Open ``page`` with ``options``; what Chromium prints."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-chromium-", ignore_cleanup_errors=True) as profile:
        if not javascript:
            # As a user switches it off; Blink's own switch would stop the headless commands too.
            settings = {"profile": {"default_content_setting_values": {"javascript": 2}}}
            preferences = Path(profile, "Default", "Preferences")
            preferences.parent.mkdir()
            preferences.write_text(json.dumps(settings))
        command = [PROGRAM, *QUIET, f"--user-data-dir={profile}", *options, page.as_uri()]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS_MOST, check=True
        ).stdout


def screenshot(
    page: Path, target: Path, width: int, height: int, *options: str, javascript: bool = True
) -> None:
    """A picture of ``page``; windows narrower than 500 pixels are had by a frame, Chromium opens none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if width < 500:
        frame = page.with_name(f"{page.stem}-{width}.html")
        size = f"style='width:{width}px;height:{height}px;border:0'"
        frame.write_text(f"<!doctype html><body style='margin:0'><iframe {size} src='{page.name}'></iframe>")
        page = frame
    run(
        page,
        f"--screenshot={target}",
        f"--window-size={max(width, 500)},{height}",
        *options,
        javascript=javascript,
    )


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


class _Answer(HTMLParser):
    """Finds what the probe left on the root element."""

    value: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "html":
            self.value = dict(attrs).get("data-probe")


def evaluate(page: Path, probe: str, scripts: Sequence[Path] = (), width: int | None = None) -> object:
    """The JSON-able value of the JavaScript function body ``probe`` in a copy of ``page`` without its policy.

    ``scripts`` are run first; ``width`` puts the page into a frame of that many pixels.
    """
    source = page.read_text()
    start = source.index('<meta http-equiv="Content-Security-Policy"')
    open_page = source[:start] + source[source.index(">", start) + 1 :]
    head = "".join(f"<script>{script.read_text()}</script>" for script in scripts)
    tail = (
        f"<script>addEventListener('load', async () => {{ const value = await (async () => {{ {probe} }})();"
        f" parent.document.documentElement.dataset.probe = JSON.stringify(value); }})</script>"
    )
    copy = page.with_name(f"{page.stem}-probe.html")
    copy.write_text(open_page.replace("</body>", f"{head}{tail}</body>"))
    options = ["--virtual-time-budget=8000", "--allow-file-access-from-files", "--dump-dom"]
    if width is not None:
        frame = page.with_name(f"{page.stem}-probe-{width}.html")
        frame.write_text(
            f"<!doctype html><iframe style='width:{width}px;height:900px' src='{copy.name}'></iframe>"
        )
        copy = frame
    parser = _Answer()
    parser.feed(run(copy, *options))
    assert parser.value is not None, "the page did not answer"
    return json.loads(parser.value)
