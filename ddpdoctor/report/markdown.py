"""Renders a diagnosis as Markdown for an issue or ticket: verdict, costliest findings with their fixes, and notes."""

from __future__ import annotations

import re
from types import SimpleNamespace

from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding
from ddpdoctor.plain import plain, plain_lines
from ddpdoctor.report import words
from ddpdoctor.report.experiment_view import TITLE, experiment_view
from ddpdoctor.report.finding_view import filled_columns, location, place, snippet
from ddpdoctor.report.job_view import Table
from ddpdoctor.report.summary import cost_sentence, run_line, subtitle
from ddpdoctor.report.tables import SHORT_ROWS, attempts_table, hang_table, trainings_table

DETAILED_FINDINGS = 3
"""Maximum number of findings shown with explanation and fix; the table has all findings."""
_LINK_OR_MENTION = re.compile(
    r"(?<=[@#])(?=[\w])|(?<=:)(?=//)|(?<=\bwww)(?=\.)|(?<=\bGH)(?=-\d)", re.IGNORECASE
)
_SEPARATOR = "<!-- -->"
"""Inserted to prevent mentions and links. Code hosts detect them in the rendered text, in which a backslash has no effect."""


def render_markdown(diagnosis: Diagnosis) -> str:
    """The diagnosis as GitHub-flavoured Markdown."""
    blocks = [f"## {escape(diagnosis.verdict.headline)}"]
    blocks += [
        escape(line) for line in (cost_sentence(diagnosis), subtitle(diagnosis), run_line(diagnosis)) if line
    ]
    standing = hang_table(diagnosis, SHORT_ROWS)
    if standing is not None:
        blocks.append(_table_markdown(standing))
    if attempts := attempts_table(diagnosis):
        blocks.append(_table_markdown(attempts))
    if trainings := trainings_table(diagnosis):
        blocks.append(_table_markdown(trainings))
    if diagnosis.findings:
        ranks, unit = words.all_ranks_label(diagnosis), words.per_step(diagnosis)
        blocks.append(_findings_table(diagnosis.findings, ranks, unit))
    blocks += [
        finding_markdown(finding)
        for finding in diagnosis.findings[:DETAILED_FINDINGS]
        if finding.severity != "info"
    ]
    if diagnosis.tried is not None:
        blocks += _trial_blocks(experiment_view(diagnosis.tried))
    blocks += ["\n".join(f"- {escape(note)}" for note in diagnosis.notes)] if diagnosis.notes else []

    blocks.append(f"<sub>ddpdoctor {escape(diagnosis.tool_version)}. {words.checks_summary(diagnosis)}</sub>")
    return "\n\n".join(blocks) + "\n"


def escape(text: str) -> str:
    """``text`` on one line, with Markdown, HTML, links and mentions escaped. Text in backticks stays code."""
    pieces = []
    for piece, is_code in words.split_code(plain(" ".join(text.split()))):
        escaped = piece.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        escaped = re.sub(r"([\\*_\[\]#|~@`])", r"\\\1", escaped)
        pieces.append(code(piece) if is_code else _LINK_OR_MENTION.sub(_SEPARATOR, escaped))
    return "".join(pieces)


def code(text: str) -> str:
    """``text`` as inline code. It may contain backticks and vertical bars."""
    line = plain(" ".join(text.split()))
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    pad = " " if "`" in line else ""
    return f"{ticks}{pad}{line.replace('|', chr(92) + '|')}{pad}{ticks}"


def _table_markdown(table: Table) -> str:
    lines = [table.head, ["---"] * len(table.head), *([escape(cell) for cell in row] for row in table.rows)]
    return "\n".join([f"**{escape(table.title)}**", "", *(f"| {' | '.join(line)} |" for line in lines)])


def _trial_blocks(view: SimpleNamespace) -> list[str]:
    unchanged_row = ["unchanged", "", view.baseline, ""]
    rows = _table_markdown(Table(TITLE, view.table.head, [unchanged_row, *view.table.rows]))
    losses = [] if view.losses is None else [_table_markdown(view.losses)]
    return [rows, *(escape(line) for line in (*view.notes, view.best) if line), *losses]


def _findings_table(findings: list[Finding], all_ranks: str, unit: str) -> str:
    table = [["finding", "who", "cost", "speedup", "where"]]
    for finding in findings:
        prefix = words.cost_prefix(finding)
        cost = words.cost_in_total(finding) or (
            words.NO_COST
            if finding.costs_ms_per_step is None
            else f"{words.milliseconds(finding.costs_ms_per_step)}{unit}"
        )
        if finding.share is not None:
            ends = (words.cost_range(finding), words.percent(finding.share))
            cost = f"{prefix}{cost} ({', '.join(filter(None, ends))})"
        where = code(location(finding)) if location(finding) else ""
        cells = [
            f"{escape(finding.title)} ({escape(finding.severity)})",
            words.rank_names(finding.ranks, all_ranks),
            cost,
            words.speedup_text(finding, prefix),
            where,
        ]
        table.append(cells)
    head, *rows = filled_columns(table)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def fenced(text: str, language: str = "") -> str:
    """``text`` as a fenced code block. It may contain backticks."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def finding_markdown(finding: Finding) -> str:
    """One finding as Markdown: explanation, source lines and first fix."""
    blocks = [f"### {escape(finding.title)}"]
    blocks += [escape(block) for block in finding.explanation.split("\n\n") if block.strip()]
    if finding.where:
        places = [place(where) for where in finding.where[:3]]
        blocks.append(
            "Where: "
            + ", ".join(
                f"{code(p.full)} in {code(p.function)}" if p.function else code(p.full) for p in places
            )
        )
        blocks += [f"Called by: {code(p.call_path)}" for p in places if p.callers]
        if places[0].text:
            blocks.append(
                fenced(
                    "\n".join(
                        f"{'>' if line.is_target else ' '} {line.number:5} {plain(line.text)}"
                        for line in places[0].text
                    )
                )
            )
    for fix in finding.fixes[:1]:
        blocks.append(f"**{escape(fix.title)}.** {escape(fix.why)}")
        if shown := snippet(finding, fix):
            blocks.append(fenced(plain_lines(shown), "python"))
        if fix.trade_off:
            blocks.append(f"Trade-off: {escape(fix.trade_off)}")
    return "\n\n".join(blocks)
