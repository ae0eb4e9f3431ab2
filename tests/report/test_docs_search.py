"""The site of the documentation, opened as a file and searched, with the network cut."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import chromium
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium on this machine")
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_search_needs_no_server(tmp_path):
    site = tmp_path / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(site)]
    subprocess.run(build, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    page = (site / "index.html").read_text(encoding="utf-8")
    assert "unpkg.com" not in page and 'src="assets/iframe-worker.js"' in page
    asked = tmp_path / "asked.html"
    asked.write_text(f"<meta http-equiv='refresh' content='0;url={(site / 'index.html').as_uri()}?q=bucket'>")
    found = chromium.run(asked, "--virtual-time-budget=15000", "--dump-dom")
    assert " matching documents" in found
