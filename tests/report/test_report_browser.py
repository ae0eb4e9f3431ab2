"""The report in a real Chromium. Screenshots are left in ``artifacts/`` for human eyes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import chromium
import msgspec
import pytest
import samples

from ddpdoctor.diagnose.diagnosis import Diagnosis, Verdict
from ddpdoctor.measure.places import Where
from ddpdoctor.report.html import write_html

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium on this machine"),
]
ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"
HEADLINE = "Rank 1 waits 46 ms per step for data; all others wait for it"


@pytest.mark.parametrize(
    ("name", "shot", "width"),
    [
        ("unhealthy", "light", 1100),
        ("unhealthy", "dark", 1100),
        ("unhealthy", "narrow", 420),
        ("large", "without-javascript", 1100),
    ],
)
def test_the_report_is_drawn(tab, pages, name, shot, width):
    target = ARTIFACTS / f"report-{name}-{shot}.png"
    target.unlink(missing_ok=True)
    if shot == "without-javascript":
        tab.without_javascript()
    tab.dark(shot == "dark")
    tab.resize(width, 4500)
    tab.open(pages / f"{name}.html")
    tab.picture(target)
    assert target.read_bytes().startswith(b"\x89PNG") and target.stat().st_size > 40_000


def test_the_report_is_complete_without_javascript(tab, pages):
    tab.without_javascript()
    tab.open(pages / "unhealthy.html")
    document = tab.value("document.documentElement.outerHTML")
    assert re.search(rf"<h1[^>]*>{HEADLINE}</h1>".replace(" ms", "&nbsp;ms"), document)
    assert "num_workers=4" in document and "all ranks on one clock" in document
    assert re.search(r'class="copy" hidden', document), (
        "copy buttons need JavaScript and must not show without it"
    )


@pytest.mark.extended
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


def test_hostile_names_run_nothing(tab, pages):
    probe = "return {images: document.images.length, scripts: document.scripts.length, title: document.title}"
    tab.open(pages / "hostile.html")
    found = tab.function(probe)
    assert found["images"] == 0
    assert found["scripts"] == 5, "data, figures, library, and the report's own scripts"
    assert found["title"].endswith(samples.HOSTILE)


def crowded() -> Diagnosis:
    """Nine findings, names of 200 letters, prices of 0.02 ms and of 40 s."""
    sample = samples.unhealthy()
    name = "a_function_with_a_name_of_many_" * 6 + "letters_in_it"
    place = Where(f"/home/alice/{name}/{name}.py", 123456, f"{name}.{name}", 0.5)
    findings = [
        msgspec.structs.replace(
            sample.findings[0], rule=f"family/rule-{n}", title=f"Rank {n} calls {name}", where=[place] * 3,
            costs_ms_per_step=0.02 if n % 2 else 40_000.0, ranks=list(range(0, 500, 2)),
        )
        for n in range(9)
    ]  # fmt: skip
    verdict = Verdict("family/rule-0", f"Rank 0 waits 40 s per step at {name}.py:123456 in {name}.{name}")
    return msgspec.structs.replace(sample, findings=findings, verdict=verdict)


@pytest.fixture(scope="session")
def crowded_page(once) -> Path:
    return once("crowded", lambda folder: write_html(crowded(), folder / "crowded.html")) / "crowded.html"


@pytest.mark.parametrize("name", [*samples.ALL, "crowded"])
@pytest.mark.parametrize("width", [420, 720, 1000])
def test_nothing_overflows_sideways(tab, pages, crowded_page, name, width):
    """420 px is a phone, 720 px half of 1,440, as with a zoom of 200 %."""
    probe = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    tab.resize(width)
    tab.open(crowded_page if name == "crowded" else pages / f"{name}.html")
    content, window = tab.function(probe)
    assert content <= window


@pytest.mark.parametrize("name", ["unhealthy", "crowded"])
def test_the_first_screen_says_who_where_and_what_to_change(tab, pages, crowded_page, name):
    tab.resize(1440, 900)
    tab.open(crowded_page if name == "crowded" else pages / f"{name}.html")
    found = tab.function("""
      const part = document.querySelector(".opening");
      return [part.getBoundingClientRect().bottom, [...part.querySelectorAll("dt")].map(word => word.textContent),
        document.querySelector(part.querySelector("a").getAttribute("href")) !== null];
    """)
    assert found[0] < 900 and found[1:] == [["Who", "Where", "What to change"], True]


def test_a_printed_report_has_no_buttons_and_cuts_nothing(tab, pages):
    tab.resize(700)
    tab.open(pages / "unhealthy.html")
    tab.ask("Emulation.setEmulatedMedia", media="print")
    found = tab.function("""
      const buttons = [...document.querySelectorAll("button")].filter(button => button.checkVisibility());
      const parts = [...document.querySelectorAll("pre, .scroll, svg.chart")].filter(part => part.checkVisibility());
      return [buttons.length, parts.filter(part => part.scrollWidth > part.clientWidth + 1).map(part => part.outerHTML.slice(0, 200))];
    """)
    assert found == [0, []]


def test_hovering_shows_values_and_copying_is_confirmed(tab, pages):
    probe = """
      const figure = document.getElementById("breakdown").nextElementSibling;
      figure.querySelector(".bars rect.p-comm_wait").dispatchEvent(new Event("pointerover", {bubbles: true}));
      const button = document.querySelector("button.copy");
      button.click();
      await new Promise(done => setTimeout(done, 300));
      const readout = figure.querySelector(".readout").textContent;
      return {readout, hidden: button.hidden, words: button.textContent};
    """
    tab.open(pages / "unhealthy.html")
    found = tab.function(probe)
    assert found["readout"].startswith("rank 0: waiting for other ranks 44.1 ms")
    assert found["hidden"] is False and found["words"].startswith(("Copied", "Selected"))


@pytest.mark.extended
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(tab, pages, scheme):
    axe = chromium.axe().read_text()
    probe = """
      for (const fold of document.querySelectorAll("details")) fold.open = true;
      const result = await axe.run(document, {resultTypes: ["violations"]});
      return result.violations.map(v => [v.id, v.impact, v.nodes.map(n => n.html + n.failureSummary)]);
    """
    tab.dark(scheme == "dark")
    for name in ("unhealthy", "healthy", "minimal"):
        tab.open(pages / f"{name}.html")
        tab.value(f"{axe}; 0")
        assert not chromium.severe(tab.function(probe))


def test_the_flame_graph_is_folded_and_accessible(tab, pages):
    tab.without_javascript()
    tab.open(pages / "unhealthy.html")
    document = tab.value("document.documentElement.outerHTML")
    graph = document[document.index('class="fold flames"') :]
    assert "open" not in graph[: graph.index(">")]
    assert (
        "<title>main train.py:57: 45.6 ms per step (89 %), 45.3 ms more than rank 0, all steps</title>"
        in graph
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
    tab.ask("Emulation.setScriptExecutionDisabled", value=False)
    tab.open(pages / "unhealthy.html")
    found = tab.function(probe)
    assert found["before"] is False and found["focused"] and found["scrolls"]
    assert found["hot"] == ["f4", "f4", "f0", "f4", "f0"]
    tops = sorted({round(box[0]) for box in found["boxes"]})
    assert len(tops) == 3, "callers above what they call"
    assert found["readout"].startswith("main train.py:57: 45.6 ms")


def test_printing_unfolds_everything(tab, pages, tmp_path):
    """Also without JavaScript, by the style sheet."""
    folded = tmp_path / "folded.html"
    folded.write_text((pages / "unhealthy.html").read_text().replace('class="fold flames"', 'class="fold"'))
    tab.without_javascript()
    tab.open(pages / "unhealthy.html")
    whole = tab.printed()
    tab.open(folded)
    assert len(whole) > len(tab.printed()) + 500
