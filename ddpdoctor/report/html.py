"""Renders the HTML report, a single file without network requests that contains a copy of ``diagnosis.json``, and the page of
figures. The templates have no logic beyond placing the data."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import jinja2
import msgspec
from markupsafe import Markup

from ddpdoctor.diagnose.diagnosis import Diagnosis, Series, SkippedRule
from ddpdoctor.diagnose.template_cache import TemplateCache
from ddpdoctor.plain import plain_lines
from ddpdoctor.report import words
from ddpdoctor.report.charts.bandwidth import bandwidth
from ddpdoctor.report.charts.bars import breakdown, waterfall, whole_run
from ddpdoctor.report.charts.flames import flames
from ddpdoctor.report.charts.lateness import lateness
from ddpdoctor.report.charts.lines import line_chart
from ddpdoctor.report.charts.scale import groups
from ddpdoctor.report.charts.series import notable_ranks, telemetry
from ddpdoctor.report.charts.timeline import timeline
from ddpdoctor.report.experiment_view import experiment_view
from ddpdoctor.report.figures.spec import light_colours, with_colours
from ddpdoctor.report.figures.specs import (
    SHA256,
    InteractiveData,
    PlotlyBundle,
    bundle_of,
    figure_specs,
    interactive_bundle,
    interactive_data,
)
from ddpdoctor.report.finding_view import finding_views, first_rows
from ddpdoctor.report.job_view import command_line, flat, hta_tables, job_groups
from ddpdoctor.report.json_output import to_json
from ddpdoctor.report.read import SCRIPT_ID
from ddpdoctor.report.summary import cost_sentence, main_finding, run_line, subtitle
from ddpdoctor.report.tables import (
    attempts_table,
    hang_table,
    memory_table,
    rank_table,
    stacks,
    trainings_table,
)
from ddpdoctor.written import REPORT, WrittenFolder, write_file

_BREAKS = re.compile(
    r"(?P<tag><[^<>]*>)|(?P<long>\w{30,})|\.(?!\w{1,5}:\d)(?=[A-Za-z_])|(?<=\w)(?=[(\[](?![)\]]))"
)
"""Matches a tag, which is kept unchanged; a name that may be longer than a line; a dot within a name, except in ``train.py:57``; or
the position before a non-empty bracket."""


@functools.cache
def page_environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ddpdoctor.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
        bytecode_cache=TemplateCache("report/html.py", "report/words.py"),
    )
    environment.filters["part"] = words.part
    environment.filters["nonbreaking_units"] = words.nonbreaking_units
    environment.filters["split_code"] = words.split_code
    environment.filters["strip_backticks"] = words.strip_backticks
    environment.filters["breakable"] = _breakable
    return environment


def _printable(value: Any) -> Any:
    """``value`` without control characters, also bidirectional ones. Jinja2 escapes the markup."""
    return plain_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _breakable(markup: Markup) -> Markup:
    """``markup`` in which lines may break after a dot and before a bracket of a name. Names of 30 or more characters may also break
    after underscores."""
    return Markup(_BREAKS.sub(_with_breaks, str(markup)))


def _with_breaks(found: re.Match[str]) -> str:
    if found["tag"]:
        return found["tag"]
    return found["long"].replace("_", "_<wbr>") if found["long"] else f"{found[0]}<wbr>"


@functools.cache
def inlined(name: str) -> tuple[Markup, str]:
    """(Content of a style sheet or script, to be inlined; its hash for the Content-Security-Policy)."""
    loader = page_environment().loader
    assert loader is not None
    source = loader.get_source(page_environment(), name)[0]
    digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return Markup(source), f"'sha256-{digest}'"


def render_html(diagnosis: Diagnosis, *, static: bool = False) -> str:
    """The report as one HTML document that contains its ``diagnosis.json``. ``static`` omits the interactive charts, which are most
    of its size."""
    data = interactive_data(diagnosis)
    return render_page(
        "report.html.j2",
        ["report.css"],
        ["report.js"],
        None if static else interactive_bundle(data),
        page=page(diagnosis, data),
        data=Markup(embedded_json(diagnosis)),
        script_id=SCRIPT_ID,
    )


def render_page(
    template: str, styles: Sequence[str], scripts: Sequence[str], bundle: PlotlyBundle | None, **content: Any
) -> str:
    """A page whose Content-Security-Policy allows only these inline styles and scripts and the chart library of ``bundle``."""
    if bundle is not None:
        styles, scripts = [*styles, "interactive.css"], [*scripts, "interactive.js"]
    allowed = [" ".join(inlined(name)[1] for name in names) for names in (styles, scripts)]
    library = f" 'sha256-{SHA256}'" if bundle is not None else ""
    policy = (
        f"default-src 'none'; style-src {allowed[0]}; script-src {allowed[1]}{library}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        page_environment()
        .get_template(template)
        .render(
            policy=Markup(policy),
            bundle=bundle,
            **{name.replace(".", "_"): inlined(name)[0] for name in (*styles, *scripts)},
            **content,
        )
    )


def render_without_scripts(template: str, **content: Any) -> str:
    """The page of ``template``, without scripts, as one HTML document."""
    style, style_hash = inlined("report.css")
    policy = f"default-src 'none'; style-src {style_hash}; base-uri 'none'; form-action 'none'"
    return page_environment().get_template(template).render(style=style, policy=Markup(policy), **content)


def write_html(diagnosis: Diagnosis, path: str | os.PathLike[str], *, static: bool = False) -> None:
    """Write the HTML report to ``path``; ``static`` as in :func:`render_html`. Raises DdpDoctorError if it cannot be written or would
    replace another file."""
    write_file(path, render_html(diagnosis, static=static), REPORT)


def notebook_html(diagnosis: Diagnosis) -> str:
    """The diagnosis for a notebook's output cell: verdict, findings, and the first fix. An HTML fragment with inline styles, without
    scripts or links; all text from the job is escaped."""
    return page_environment().get_template("notebook.html.j2").render(page=page(diagnosis))


Point = TypeVar("Point")

BUDGET_BYTES = 600_000
"""Maximum size of the embedded copy of ``diagnosis.json``. The whole report is limited to 1.5 MB."""
RANKS, POINTS, SPANS, SOURCES, FRAMES = 16, 120, 1500, 64, 60
"""Limits of a thinned copy: ranks and points of the series, spans of the timeline, telemetry series, frames of a flame graph."""

THINNED_NOTE = (
    "The data inside this HTML report is thinned to keep the file small; "
    "diagnosis.json (`--json`) has all of it."
)


def embedded_json(diagnosis: Diagnosis) -> str:
    """The diagnosis as JSON for a ``<script>`` element: ``<``, ``>`` and ``&`` are escaped."""
    data, series = b"", diagnosis.series
    numbers = sum(map(len, (*series.step_ms, *series.late_ms)))
    numbers += sum(2 * len(one.values) for one in diagnosis.telemetry)
    forms: list[tuple[Callable[[Diagnosis], Diagnosis], int]]
    forms = [(lambda whole: whole, 8), (_rounded, 5), (_thinned, 0), (_summary_only, 0)]
    for form, bytes_per_number in forms:
        # Skip forms that are certainly too large, because encoding them takes seconds.
        if numbers * bytes_per_number > BUDGET_BYTES:
            continue
        data = to_json(form(diagnosis))
        if len(data) <= BUDGET_BYTES:
            break
    text = data.decode()
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _rounded(diagnosis: Diagnosis) -> Diagnosis:
    """``diagnosis`` with series and telemetry rounded to four significant digits, all that charts show."""
    series = diagnosis.series
    rounded = msgspec.structs.replace(
        series,
        step_ms=[_rounded_values(row) for row in series.step_ms],
        late_ms=[_rounded_values(row) for row in series.late_ms],
    )
    telemetry = [
        msgspec.structs.replace(one, t_s=_rounded_values(one.t_s), values=_rounded_values(one.values))
        for one in diagnosis.telemetry
    ]
    return msgspec.structs.replace(diagnosis, series=rounded, telemetry=telemetry)


def _thinned(diagnosis: Diagnosis) -> Diagnosis:
    """``diagnosis`` with only the notable ranks, every n-th point and the first spans, and a note on the missing data."""
    chosen_ranks = set(notable_ranks(diagnosis)[:RANKS])
    source = diagnosis.timeline
    if source is not None and len(source.spans) > SPANS:
        spans = [span for span in source.spans if not chosen_ranks or span.rank in chosen_ranks][:SPANS]
        source = msgspec.structs.replace(source, spans=spans)
    flames = [
        msgspec.structs.replace(one, frames=sorted(one.frames, key=lambda frame: -frame.ms)[:FRAMES])
        for one in diagnosis.flames
    ]
    telemetry = [
        msgspec.structs.replace(one, t_s=_every_nth(one.t_s), values=_every_nth(one.values))
        for one in diagnosis.telemetry[:SOURCES]
    ]
    return _rounded(
        msgspec.structs.replace(
            diagnosis,
            series=_thin_series(diagnosis.series, chosen_ranks),
            timeline=source,
            flames=flames,
            telemetry=telemetry,
            notes=[*diagnosis.notes, THINNED_NOTE],
        )
    )


def _summary_only(diagnosis: Diagnosis) -> Diagnosis:
    """``diagnosis`` with only verdict, findings and summaries."""
    return msgspec.structs.replace(
        diagnosis,
        series=Series(),
        timeline=None,
        flames=[],
        telemetry=[],
        facts={},
        hta=None,
        notes=[*diagnosis.notes, THINNED_NOTE],
    )


def _thin_series(series: Series, chosen: set[int]) -> Series:
    chosen_ranks = [rank for rank in series.ranks if rank in chosen] or series.ranks
    kept = [series.ranks.index(rank) for rank in chosen_ranks[:RANKS]]
    return Series(
        steps=_every_nth(series.steps),
        ranks=[series.ranks[index] for index in kept],
        step_ms=[_every_nth(series.step_ms[index]) for index in kept if index < len(series.step_ms)],
        late_ms=[_every_nth(series.late_ms[index]) for index in kept if index < len(series.late_ms)],
    )


def _rounded_values(row: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.4g}") for value in row]


def _every_nth(values: Sequence[Point]) -> list[Point]:
    return [values[group.start] for group in groups(len(values), POINTS)]


FIGURES_PAGE = "figures.html"


def write_figures(diagnosis: Diagnosis, folder: str | os.PathLike[str]) -> list[Path]:
    """Write ``figures.html`` and a ``<name>.json`` per figure into ``folder``. Returns their paths; [] if there is nothing to draw.
    Raises DdpDoctorError if a file cannot be written."""
    specs = figure_specs(diagnosis)
    if not specs:
        return []
    target = WrittenFolder(Path(folder), "figures")
    target.check([FIGURES_PAGE, *(f"{name}.json" for name in specs)])
    titles = [(name, html.unescape(spec["layout"]["title"]["text"])) for name, spec in specs.items()]
    content = render_page(
        "figures.html.j2",
        ["report.css"],
        [],
        bundle_of(specs),
        titles=titles,
        headline=diagnosis.verdict.headline,
        healthy=diagnosis.healthy,
        tool_version=diagnosis.tool_version,
    )
    figure_files = (
        (f"{name}.json", to_json(with_colours(spec, light_colours()))) for name, spec in specs.items()
    )
    return target.write([(FIGURES_PAGE, content.encode("utf-8", "backslashreplace")), *figure_files])


MIN_STEPS_FOR_QUANTILES = 5
"""Minimum number of steps for a median and a 95th percentile."""


def _main_view(diagnosis: Diagnosis, findings: Sequence[SimpleNamespace]) -> SimpleNamespace | None:
    main = main_finding(diagnosis)
    places = [index for index, finding in enumerate(diagnosis.findings[: len(findings)]) if finding is main]
    if main is None or not places:
        return None
    return SimpleNamespace(**vars(findings[places[0]]) | {"ranks": words.who(main, diagnosis)})


def _skipped_groups(rules: Sequence[SkippedRule]) -> list[tuple[str, Sequence[SkippedRule]]]:
    lacking = [rule for rule in rules if rule.applies]
    others = [rule for rule in rules if not rule.applies]
    kinds = [(lacking, "lacked data"), (others, "does not apply" if len(others) == 1 else "do not apply")]
    return [
        (f"{words.count(len(found), 'check')} {what}", first_rows(found, "rule")[0])
        for found, what in kinds
        if found
    ]


def page(diagnosis: Diagnosis, data: InteractiveData | None = None) -> SimpleNamespace:
    """All content of the HTML report. ``data``: the numbers of its interactive charts, if already computed.

    Without content, lists are empty, texts "" and charts None.
    """
    data = data or interactive_data(diagnosis)
    notes, more_notes = first_rows(diagnosis.notes, "note")
    findings = finding_views(diagnosis.findings, diagnosis.verdict.rule, words.all_ranks_label(diagnosis))
    return SimpleNamespace(
        healthy=diagnosis.healthy,
        title=f"ddpdoctor: {diagnosis.verdict.headline}",
        headline=words.split_code(diagnosis.verdict.headline),
        cost_sentence=cost_sentence(diagnosis),
        main=_main_view(diagnosis, findings),
        subtitle=subtitle(diagnosis),
        run=run_line(diagnosis),
        numbers=numbers(diagnosis),
        waterfall=waterfall(diagnosis),
        findings=findings,
        more_findings=first_rows(diagnosis.findings, "finding")[1],
        whole_run=whole_run(diagnosis),
        breakdown=breakdown(diagnosis),
        step_times=line_chart(data.times),
        lateness=lateness(data.late),
        timeline=timeline(data.step),
        flames=flames(diagnosis),
        bandwidth=bandwidth(diagnosis),
        telemetry=telemetry(diagnosis),
        rank_table=rank_table(diagnosis),
        memory_table=memory_table(diagnosis),
        hang_table=hang_table(diagnosis),
        attempts=attempts_table(diagnosis),
        trainings=trainings_table(diagnosis),
        stacks=stacks(diagnosis),
        checked=first_rows(diagnosis.checked, "rule")[0],
        skipped=_skipped_groups(diagnosis.skipped),
        notes=[words.split_code(note) for note in (*notes, *filter(None, [more_notes]))],
        found_nothing=len(diagnosis.checked),
        job=job_groups(diagnosis),
        reproduce=reproduce(diagnosis),
        facts=flat(diagnosis.facts),
        hta=hta_tables(diagnosis.hta),
        experiment=None if diagnosis.tried is None else experiment_view(diagnosis.tried),
        tool_version=diagnosis.tool_version,
    )


def numbers(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """The numbers below the verdict: (name, value), without unknown ones."""
    steps, rows = diagnosis.steps, []
    has_quantiles = steps.measured >= MIN_STEPS_FOR_QUANTILES
    if steps.median_ms is not None:
        rows.append(
            ("step time (median)" if has_quantiles else "step time", words.milliseconds(steps.median_ms))
        )
    if steps.p95_ms is not None and has_quantiles:
        rows.append(("95 % of steps within", words.milliseconds(steps.p95_ms)))
    if steps.samples_per_s is not None:
        rows.append(("samples per second", words.significant(steps.samples_per_s)))
    if steps.measured:
        rows.append(
            (
                "steps measured",
                f"{steps.measured:,} of {steps.count:,}" if steps.count else f"{steps.measured:,}",
            )
        )
    return rows


def reproduce(diagnosis: Diagnosis) -> list[str]:
    """Commands that reproduce this report, without those whose input is unknown."""
    lines = []
    if diagnosis.job.command:
        lines.append(f"ddpdoctor run -- {command_line(diagnosis.job.command)}")
    if diagnosis.source:
        lines.append(f"ddpdoctor analyze {command_line(diagnosis.source)} --html report.html")
    return lines
