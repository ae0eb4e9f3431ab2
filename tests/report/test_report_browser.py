"""The report in a real Chromium. Screenshots are left in ``artifacts/`` for human eyes."""

from __future__ import annotations

import json
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
    assert found["scripts"] == 6, "data, figures, library, the report's own scripts, and this probe"
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
    axe = chromium.axe()
    monkeypatch.setattr(chromium, "QUIET", (*chromium.QUIET, *options))
    probe = """
      for (const fold of document.querySelectorAll("details")) fold.open = true;
      const result = await axe.run(document, {resultTypes: ["violations"]});
      return result.violations.map(v => [v.id, v.impact, v.nodes.map(n => n.html + n.failureSummary)]);
    """
    for name in ("sick", "healthy", "minimal"):
        found = chromium.evaluate(pages / f"{name}.html", probe, [axe])
        assert not chromium.severe(found)


def test_the_flame_graph_is_folded_reachable_by_keys_and_read_without_javascript(pages):
    document = chromium.run(pages / "sick.html", "--dump-dom", javascript=False)
    graph = document[document.index('class="fold flames"') :]
    assert "open" not in graph[: graph.index(">")]
    assert (
        "<title>main train.py:57: 45.6 ms a step (89 %), 45.3 ms more than rank 0, all steps</title>" in graph
    )
    probe = """
      const fold = document.querySelector("details.flames");
      const before = fold.querySelector("svg.flame").checkVisibility();
      fold.querySelector("summary").focus();
      const focused = document.activeElement === fold.querySelector("summary");
      fold.open = true;
      const bars = [...fold.querySelectorAll("svg.flame rect")].filter(bar => bar.closest("svg.flame") === fold.querySelector("svg.flame"));
      const boxes = bars.map(bar => bar.getBoundingClientRect()).map(box => [box.top, box.left, box.right]);
      const hot = bars.map(bar => bar.getAttribute("class"));
      const scrolls = [...fold.querySelectorAll(".scroll")].every(part => part.tabIndex === 0);
      bars[1].dispatchEvent(new Event("pointerover", {bubbles: true}));
      return {before, focused, boxes, hot, scrolls, readout: fold.querySelector(".readout").textContent};
    """
    found = chromium.evaluate(pages / "sick.html", probe)
    assert found["before"] is False and found["focused"] and found["scrolls"]
    assert found["hot"] == ["f4", "f4", "f0", "f4", "f0"]
    tops = sorted({round(box[0]) for box in found["boxes"]})
    assert len(tops) == 3, "callers above what they call"
    assert found["readout"].startswith("main train.py:57: 45.6 ms")


def test_it_is_printed_unfolded(pages, tmp_path):
    """On paper nobody can unfold it: without JavaScript the style does."""
    target = tmp_path / "page.pdf"
    chromium.run(pages / "sick.html", f"--print-to-pdf={target}", javascript=False)
    folded = tmp_path / "folded.html"
    page = (pages / "sick.html").read_text()
    folded.write_text(page.replace('class="fold flames"', 'class="fold"'))
    other = tmp_path / "folded.pdf"
    chromium.run(folded, f"--print-to-pdf={other}", javascript=False)
    assert target.stat().st_size > other.stat().st_size + 500
