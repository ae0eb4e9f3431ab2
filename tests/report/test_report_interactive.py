"""Interactive charts of a report in Chromium, with the report's policy in force."""

from __future__ import annotations

import base64
import gzip
import re
from pathlib import Path

import chromium
import devtools
import msgspec
import pytest
import samples

from ddpdoctor.report.html import write_figures, write_html
from ddpdoctor.report.redaction import redact

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium on this machine"),
]
ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"
STEP_TIMES = "document.getElementById('interactive-step_times')"
LATENESS = "document.getElementById('interactive-lateness')"
DRAWN = "?._fullLayout && [...document.querySelectorAll('.interactive-words')].every(w => !w.textContent.startsWith('Opening'))"

AREA = (
    "(() => { const area = PLOT.querySelector('.nsewdrag').getBoundingClientRect();"
    " return [area.left, area.top, area.width, area.height]; })()"
)


def of_button(name: str) -> str:
    return f"document.querySelector('[data-figure={name}] .interactive-open')"


def span(tab: devtools.Tab, plot: str) -> float:
    low, high = tab.value(f"{plot}.layout.xaxis.range")
    return high - low


def nothing_wrong(tab: devtools.Tab) -> None:
    assert tab.complaints() == []
    assert tab.requests() == []


def test_nothing_is_unpacked_before_the_first_click(tab, pages):
    tab.open(pages / "unhealthy.html")
    assert tab.value("typeof Plotly") == "undefined"
    assert tab.value(
        "[...document.querySelectorAll('.interactive')].map(b => [b.dataset.figure, b.hidden])"
    ) == [
        ["step_times", False],
        ["lateness", False],
        ["timeline", False],
    ]
    nothing_wrong(tab)


def test_keys_open_zoom_move_and_close(tab, pages):
    tab.open(pages / "unhealthy.html")
    tab.value(f"{of_button('step_times')}.focus()")
    tab.press("Enter")
    tab.until(f"{STEP_TIMES}{DRAWN}")
    tab.until(f"document.activeElement === {STEP_TIMES}")
    whole = span(tab, STEP_TIMES)
    tab.press("+")
    tab.until(f"{STEP_TIMES}.layout.xaxis.range[1] - {STEP_TIMES}.layout.xaxis.range[0] < {0.6 * whole}")
    before = tab.value(f"{STEP_TIMES}.layout.xaxis.range[0]")
    tab.press("ArrowRight")
    tab.until(f"{STEP_TIMES}.layout.xaxis.range[0] > {before}")
    tab.press("0")
    tab.until(f"{STEP_TIMES}.layout.xaxis.range[1] - {STEP_TIMES}.layout.xaxis.range[0] > {0.99 * whole}")
    assert tab.value(f"{of_button('step_times')}.getAttribute('aria-expanded')") == "true"
    assert tab.value(f"{STEP_TIMES}.layout.yaxis.range[0]") == 0
    tab.press("Escape")
    tab.until(f"{STEP_TIMES}.hidden && document.activeElement === {of_button('step_times')}")
    assert (
        tab.value("getComputedStyle(document.querySelector('#step-times ~ figure > svg.chart')).display")
        == "block"
    )
    nothing_wrong(tab)


def test_hovering_over_a_step_shows_every_rank(tab, pages):
    tab.open(pages / "unhealthy.html")
    tab.value(f"{of_button('step_times')}.click()")
    tab.until(f"{STEP_TIMES}{DRAWN}")
    tab.value(f"{STEP_TIMES}.scrollIntoView()")
    left, top, width, height = tab.value(AREA.replace("PLOT", STEP_TIMES))
    for x in (0.4, 0.5):
        tab.point(left + x * width, top + height / 2)
    words = tab.until(f"{STEP_TIMES}.querySelector('.hoverlayer').textContent")
    assert "step " in words and "rank 0" in words and "rank 1" in words and " ms" in words
    tab.point(left + 0.2 * width, top + 0.5 * height, "mousePressed")
    for x in (0.3, 0.4):
        tab.point(left + x * width, top + 0.5 * height)
    tab.point(left + 0.4 * width, top + 0.5 * height, "mouseReleased")
    tab.until(f"{STEP_TIMES}.layout.xaxis.range[1] - {STEP_TIMES}.layout.xaxis.range[0] < 40")
    nothing_wrong(tab)


@pytest.mark.parametrize("name", sorted(samples.ALL))
def test_every_chart_opens_under_the_policy(tab, pages, name):
    tab.open(pages / f"{name}.html")
    buttons = tab.value("[...document.querySelectorAll('.interactive-open')].length")
    assert (buttons > 0) == (name != "minimal")
    for number in range(buttons):
        tab.value(f"document.querySelectorAll('.interactive-open')[{number}].click()")
        tab.until(f"document.querySelectorAll('.interactive-plot')[{number}]{DRAWN}")
    if buttons:
        tab.value("document.querySelector('.interactive').scrollIntoView()")
        tab.picture(ARTIFACTS / f"interactive-{name}.png")
    assert tab.value("document.images.length") == 0
    assert tab.value("document.querySelectorAll('.interactive-plot a').length") == 0
    nothing_wrong(tab)


def test_hovering_over_a_cell_shows_rank_step_and_lateness(tab, pages):
    tab.open(pages / "unhealthy.html")
    tab.value(f"{of_button('lateness')}.click()")
    tab.until(f"{LATENESS}{DRAWN}")
    tab.value(f"{LATENESS}.scrollIntoView()")
    left, top, width, height = tab.value(AREA.replace("PLOT", LATENESS))
    for x in (0.4, 0.5):
        tab.point(left + x * width, top + 0.75 * height)
    words = tab.until(f"{LATENESS}.querySelector('.hoverlayer').textContent")
    assert re.fullmatch(r"rank 1, step \d+: [\d.]+ ms late", words)
    nothing_wrong(tab)


def test_a_finding_leads_to_its_steps(tab, tmp_path):
    diagnosis = samples.unhealthy()
    late, barrier = diagnosis.findings
    some = msgspec.structs.replace(late, steps=[40, 60], persistence="range")
    write_html(msgspec.structs.replace(diagnosis, findings=[some, barrier]), tmp_path / "r.html")
    tab.open(tmp_path / "r.html")
    tab.value("document.querySelector('#finding-1 .to-steps').focus()")
    tab.press("Enter")
    tab.until(f"{LATENESS}{DRAWN} && document.activeElement === {STEP_TIMES}")
    for plot in (STEP_TIMES, LATENESS):
        low, high = tab.until(f"{plot}.layout.xaxis.range[1] < 80 && {plot}.layout.xaxis.range")
        assert 30 < low <= 40 and 60 <= high < 70
        assert tab.value(f"{plot}.layout.shapes.map(s => [s.x0, s.x1])") == [[39.5, 60.5]]
    assert tab.value(f"{STEP_TIMES}.data.slice(0, 2).map(t => t.opacity)") == [0.35, 1]
    words = tab.value(f"{STEP_TIMES}.closest('.interactive').querySelector('.interactive-words').textContent")
    assert words.startswith("Finding 1, rank 1: steps 40 to 60.")
    top = tab.value(f"{STEP_TIMES}.getBoundingClientRect().top")
    assert 0 <= top < 600, "scrolled there"
    tab.press("Escape")
    tab.until("document.activeElement === document.querySelector('#finding-1 .to-steps')")
    nothing_wrong(tab)


def test_dark_mode_and_print(tab, pages):
    tab.open(pages / "unhealthy.html")
    tab.value(f"{of_button('timeline')}.click()")
    plot = "document.getElementById('interactive-timeline')"
    tab.until(f"{plot}{DRAWN}")
    light = tab.value(f"{plot}.layout.font.color")
    tab.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    try:
        tab.until(f"{plot}.layout.font.color !== '{light}'")
        assert tab.value(f"{plot}.layout.font.color") == "#e4e2dd"
        tab.value(f"{plot}.closest('.interactive').scrollIntoView()")
        tab.picture(ARTIFACTS / "interactive-dark.png")
    finally:
        tab.ask("Emulation.setEmulatedMedia", features=[])
    tab.ask("Emulation.setEmulatedMedia", media="print")
    try:
        assert tab.value(f"getComputedStyle({plot}.closest('.interactive')).display") == "none"
        still = f"getComputedStyle({plot}.closest('figure').querySelector(':scope > svg.chart')).display"
        assert tab.value(still) == "block"
    finally:
        tab.ask("Emulation.setEmulatedMedia", media="")
    nothing_wrong(tab)


@pytest.mark.extended
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_open_charts(tab, pages, scheme):
    axe = chromium.axe().read_text()
    tab.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    try:
        tab.open(pages / "unhealthy.html")
        tab.value("document.querySelector('.to-steps').click()")
        tab.value(f"{of_button('timeline')}.click()")
        tab.until(f"{LATENESS}{DRAWN} && document.getElementById('interactive-timeline'){DRAWN}")
        tab.value(f"{axe}; 0")
        found = tab.value(
            "axe.run(document, {resultTypes: ['violations']}).then(r => "
            "r.violations.map(v => [v.id, v.impact, v.nodes.map(n => n.html)]))"
        )
        assert not chromium.severe(found)
    finally:
        tab.ask("Emulation.setEmulatedMedia", features=[])


def test_a_changed_library_does_not_run(tab, pages, tmp_path):
    """The policy allows only one script."""
    source = (pages / "unhealthy.html").read_text()
    end = source.index("</script>", source.index('id="ddpdoctor-plotly"'))
    other = base64.b64encode(gzip.compress(b"window.Plotly = {newPlot() { window.ran = true; }};")).decode()
    begin = source.index(">", source.index('id="ddpdoctor-plotly"')) + 1
    (tmp_path / "r.html").write_text(source[:begin] + other + source[end:])
    tab.open(tmp_path / "r.html")
    tab.value(f"{of_button('step_times')}.click()")
    words = "document.querySelector('[data-figure=step_times] .interactive-words').textContent"
    assert "cannot show it" in tab.until(f"!{words}.startsWith('Opening') && {words}")
    assert tab.value("window.ran === undefined && typeof Plotly === 'undefined'")
    assert any("Content Security Policy" in each for each in tab.complaints())


def test_the_page_of_all_figures_draws_them_at_once(tab, tmp_path):
    files = write_figures(samples.unhealthy(), tmp_path)
    tab.open(files[0])
    tab.until("[...document.querySelectorAll('.interactive-plot')].every(p => p._fullLayout && !p.hidden)")
    assert tab.value("document.querySelectorAll('.interactive-plot').length") == len(files) - 1
    for number in range(len(files) - 1):
        tab.value(f"document.querySelectorAll('figure')[{number}].scrollIntoView()")
        tab.picture(ARTIFACTS / f"figures-{number}.png")
    nothing_wrong(tab)


def test_interactive_charts_are_redacted(tab, tmp_path):
    diagnosis = samples.unhealthy()
    hosts = [f"{name}.acme.example.com" for name in ("tulip", "daisy")]
    ranks = [msgspec.structs.replace(r, host=h) for r, h in zip(diagnosis.ranks, hosts, strict=True)]
    diagnosis = msgspec.structs.replace(
        diagnosis, ranks=ranks, job=msgspec.structs.replace(diagnosis.job, hosts=hosts)
    )
    files = write_figures(redact(diagnosis), tmp_path)
    tab.open(files[0])
    drawn = tab.until(
        "document.querySelectorAll('.interactive-plot text').length > 5 && document.body.innerText"
    )
    assert "host-1" in drawn and not re.search("tulip|daisy|node17|acme", drawn)
