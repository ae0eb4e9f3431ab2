"""The report in a real Chromium. Screenshots are left in ``artifacts/`` for human eyes."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import chromium
import pytest
import samples

from ddpdoctor.report import write_html

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium on this machine"),
]
ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"
HEADLINE = "Rank 1 waits 46 ms a step for data; all others wait for it"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    for name, sample in samples.ALL.items():
        write_html(sample(), folder / f"{name}.html")
    return folder


@pytest.mark.parametrize(
    ("name", "shot", "width", "options", "javascript"),
    [
        ("sick", "light", 1100, [], True),
        ("sick", "dark", 1100, [chromium.DARK], True),
        ("sick", "narrow", 420, [], True),
        ("large", "without-javascript", 1100, [], False),
    ],
)
def test_it_is_drawn(pages, name, shot, width, options, javascript):
    target = ARTIFACTS / f"report-{name}-{shot}.png"
    target.unlink(missing_ok=True)
    chromium.screenshot(pages / f"{name}.html", target, width, 4500, *options, javascript=javascript)
    assert target.read_bytes().startswith(b"\x89PNG") and target.stat().st_size > 40_000


def test_everything_is_there_without_javascript(pages):
    document = chromium.run(pages / "sick.html", "--dump-dom", javascript=False)
    assert re.search(rf"<h1[^>]*>{HEADLINE}</h1>", document)
    assert "num_workers=4" in document and "all ranks on one clock" in document
    assert re.search(r'class="copy" hidden', document), (
        "copy buttons need JavaScript and must not show without it"
    )


def test_no_request_leaves_the_file(pages, tmp_path):
    log = tmp_path / "net.json"
    chromium.run(pages / "hostile.html", f"--log-net-log={log}", "--dump-dom")
    asked = {
        event["params"]["url"]
        for event in json.loads(log.read_text())["events"]
        if isinstance(event.get("params"), dict) and "url" in event["params"]
    }
    # The browser itself may look for its own updates; the page may not have asked for anything.
    own = re.compile(r"https?://([\w.-]+\.)?(google|googleapis|gvt1|gstatic)\.com/")
    assert not [
        url
        for url in asked
        if not url.startswith(("file:", "data:", "chrome", "about:")) and not own.match(url)
    ]


def test_hostile_names_run_nothing(pages):
    probe = "return {images: document.images.length, scripts: document.scripts.length, title: document.title}"
    found = chromium.evaluate(pages / "hostile.html", probe)
    assert found["images"] == 0
    assert found["scripts"] == 3, "data, the report's own script, and this probe"
    assert found["title"].endswith(samples.HOSTILE)


@pytest.mark.parametrize(("name", "width"), [("sick", 420), ("large", 420), ("sick", 1000)])
def test_nothing_sticks_out_sideways(pages, name, width):
    probe = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    content, window = chromium.evaluate(pages / f"{name}.html", probe, width=width)
    assert content <= window


def test_pointing_at_a_bar_reads_it_out_and_copying_says_so(pages):
    probe = """
      const figure = document.getElementById("breakdown").nextElementSibling;
      figure.querySelector(".bars rect.p-comm_wait").dispatchEvent(new Event("pointerover", {bubbles: true}));
      const button = document.querySelector("button.copy");
      button.click();
      await new Promise(done => setTimeout(done, 300));
      const readout = figure.querySelector(".readout").textContent;
      return {readout, hidden: button.hidden, words: button.textContent};
    """
    found = chromium.evaluate(pages / "sick.html", probe)
    assert found["readout"].startswith("rank 0: waiting for other ranks 44.1 ms")
    assert found["hidden"] is False and found["words"].startswith(("Copied", "Selected"))


@pytest.mark.parametrize("options", [[], [chromium.DARK]], ids=["light", "dark"])
def test_axe_finds_nothing_serious(pages, options, monkeypatch):
    """Needs axe-core's ``axe.min.js``, from the package ``axe-playwright-python`` or named by AXE_CORE."""
    package = importlib.util.find_spec("axe_playwright_python")
    beside = Path(package.origin).with_name("axe.min.js") if package and package.origin else None
    axe = os.environ.get("AXE_CORE") or beside
    if not axe:
        pytest.skip("axe-playwright-python is not installed, and AXE_CORE does not name axe.min.js")
    monkeypatch.setattr(chromium, "QUIET", (*chromium.QUIET, *options))
    probe = """
      for (const fold of document.querySelectorAll("details")) fold.open = true;
      const result = await axe.run(document, {resultTypes: ["violations"]});
      return result.violations.map(v => [v.id, v.impact, v.nodes.map(n => n.html + n.failureSummary)]);
    """
    for name in ("sick", "healthy", "minimal"):
        found = chromium.evaluate(pages / f"{name}.html", probe, [Path(axe)])
        assert not [entry for entry in found if entry[1] in ("serious", "critical", "moderate")], found
