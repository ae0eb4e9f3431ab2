"""Prints the diagnosis on the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding
from ddpdoctor.measure.taxonomy import PARTS, Part
from ddpdoctor.plain import plain, plain_lines
from ddpdoctor.report import words
from ddpdoctor.report.console_output import (
    MAX_CELL_LENGTH,
    PADDING,
    cell,
    plain_table,
    print_line,
    print_wrapped,
    truncated,
)
from ddpdoctor.report.experiment_view import TITLE, print_experiment
from ddpdoctor.report.finding_view import (
    MAX_LISTED,
    evidence_value,
    evidence_words,
    filled_columns,
    lines_of_ranks,
    location,
    order_words,
    place,
    snippet,
    who_and_where,
)
from ddpdoctor.report.job_view import Table as TextTable
from ddpdoctor.report.summary import (
    collectives_line,
    cost_sentence,
    explained_findings,
    main_finding,
    run_line,
    steps_measured,
    subtitle,
)
from ddpdoctor.report.tables import (
    SHORT_ROWS,
    attempts_table,
    growing_memory,
    hang_table,
    memory_line,
    stacks,
    trainings_table,
)

FINDINGS, NOTES = 8, 3
"""Maximum number of findings and notes shown without ``verbose``. With it, the limits of the reports apply."""
WIDE = 100
"""Minimum terminal width for a column with the costs' 90 % intervals."""
SEVERITY_STYLES = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
PART_MARKS = {
    Part.DATA_WAIT: ("d", "yellow"),
    Part.H2D: (">", "bright_yellow"),
    Part.COMPUTE: ("c", "blue"),
    Part.COMM_WAIT: ("w", "red"),
    Part.COMM_TRANSFER: ("n", "magenta"),
    Part.BARRIER: ("b", "bright_magenta"),
    Part.HOST: ("h", "green"),
    Part.CHECKPOINT: ("k", "cyan"),
    Part.OTHER: ("o", "bright_black"),
}
"""(Letter, colour) of each part in the bar. The letters are used on consoles without colours."""
_MIN_STEPS_FOR_P95 = 20
"""Minimum number of steps for a 95th percentile. With fewer steps it is the longest step."""
_MIN_SECONDS_MS = 10_000
"""Costs of at least this are shown in seconds."""
_GAP = "   "
"""Separator between two entries of the legend."""
_MAX_PLACES = 2
"""Maximum number of ranks whose own lines are shown without ``verbose``."""
_MAX_RANKS_WIDTH = 16
"""Maximum width of the column "who", which may wrap."""


def print_terminal(
    diagnosis: Diagnosis, console: Console, *, quiet: bool = False, verbose: bool = False
) -> None:
    """Print the diagnosis.

    ``quiet``: only the verdict. ``verbose``: every finding with its evidence. Lines fit 80 columns if possible, but no word is
    broken. ``console`` determines whether colours are used (NO_COLOR, pipes).
    """
    headline_style = "bold green" if diagnosis.healthy else "bold red"
    if quiet:
        # Not wrapped, because scripts read it.
        console.print(Text(plain(diagnosis.verdict.headline), style=headline_style), soft_wrap=True)
        return
    print_line(console, diagnosis.verdict.headline, headline_style)
    if cost := cost_sentence(diagnosis):
        print_line(console, cost)
    main = main_finding(diagnosis)
    _print_main_finding(main, diagnosis, console)
    about = (subtitle, run_line, _steps_line, collectives_line, memory_line)
    for details in filter(None, (line(diagnosis) for line in about)):
        print_line(console, details, "dim")
    for finding in growing_memory(diagnosis):
        print_line(console, finding.title, SEVERITY_STYLES.get(finding.severity, ""))
    if diagnosis.breakdown:
        _print_breakdown(diagnosis, console)
    if diagnosis.findings:
        _print_findings(diagnosis, console, MAX_LISTED if verbose else FINDINGS)
    _print_hang(diagnosis, console, verbose)
    _print_rows(console, attempts_table(diagnosis))
    _print_rows(console, trainings_table(diagnosis))
    for finding in diagnosis.findings[:MAX_LISTED] if verbose else explained_findings(diagnosis):
        _print_finding(finding, console, verbose)
    if diagnosis.tried is not None:
        console.print()
        print_line(console, TITLE, "bold")
        print_experiment(diagnosis.tried, console)
    if diagnosis.hta is not None:
        console.print()
        print_line(console, _hta_sentence(diagnosis.hta), "dim")
    _print_notes_and_checks(diagnosis, console, verbose)


def _print_main_finding(main: Finding | None, diagnosis: Diagnosis, console: Console) -> None:
    """Print the ranks, the source line and the first fix of the main finding. Prints nothing without a finding."""
    if main is None:
        return
    print_line(console, f"Who: {who_and_where(main, words.who(main, diagnosis))}")
    if main.fixes:
        print_line(console, f"{words.fix_label(main.fixes[0])}: {main.fixes[0].title}", "bold")


def _print_findings(diagnosis: Diagnosis, console: Console, max_rows: int) -> None:
    """Print a table of the ``max_rows`` costliest findings, and the number of the others."""
    console.print()
    shown = _effects_below_causes(diagnosis.findings[:max_rows])
    unit = "ms" if words.step_label(diagnosis) == "recording" else "ms/step"
    print_wrapped(console, _findings_table(shown, console.width, words.all_ranks_label(diagnosis), unit))
    verbose = max_rows == MAX_LISTED
    assumption = f"≈: estimate under an assumption{', stated below' if verbose else '; `-v` states it'}"
    causes = {finding.caused_by for finding in shown if finding.caused_by}
    hints = (
        [f"↳: overlaps with {causes.pop() if len(causes) == 1 else 'another finding'}; fix that first"]
        if causes
        else []
    )
    hints += dict.fromkeys(
        filter(None, (words.cost_prefix(each, "≤: upper bound", assumption) for each in shown))
    )
    costless = sum(_cost(each, "") == words.NO_COST for each in shown)
    hints += ["–: no cost of its own"] if 0 < costless < len(shown) else []
    explained = len(explained_findings(diagnosis))
    hints += [order] if (order := order_words(shown)) else []
    hints += ["`-v` explains every finding"] if not verbose and len(diagnosis.findings) > explained else []
    if hints:
        print_line(console, " · ".join(hints), "dim")
    if len(shown) < len(diagnosis.findings):
        print_line(
            console, f"and {words.count(len(diagnosis.findings) - len(shown), 'cheaper finding')}", "dim"
        )
    if not verbose:
        _print_unexplained(diagnosis, console)


def _print_unexplained(diagnosis: Diagnosis, console: Console) -> None:
    """Print the title and first fix of each listed finding that is not an effect of another one and not explained elsewhere."""
    explained = [each.rule for each in (*explained_findings(diagnosis), *growing_memory(diagnosis))]
    for finding in diagnosis.findings[:FINDINGS]:
        if finding.caused_by or finding.rule in explained:
            continue
        title = "" if finding.title in diagnosis.verdict.headline else finding.title
        fixes = (f"{words.fix_label(fix)}: {fix.title}" for fix in finding.fixes[:1])
        if said := ". ".join(filter(None, (title, *fixes))):
            style = SEVERITY_STYLES.get(finding.severity, "")
            print_wrapped(console, Text.assemble((plain(finding.rule), style), plain(truncated(f": {said}"))))


def _effects_below_causes(findings: list[Finding]) -> list[Finding]:
    """The findings in their order, with each effect below its cause."""
    rules = {finding.rule for finding in findings}
    effects: defaultdict[str | None, list[Finding]] = defaultdict(list)
    for finding in findings:
        effects[finding.caused_by if finding.caused_by in rules else None].append(finding)
    ordered: list[Finding] = []
    waiting = effects.pop(None, [])[::-1]
    while waiting:
        ordered.append(waiting.pop())
        waiting += effects.pop(ordered[-1].rule, [])[::-1]
    return ordered + [finding for left in effects.values() for finding in left]


def _hta_sentence(results: Mapping[str, Any]) -> str:
    """A sentence that lists the available results of HolisticTraceAnalysis. Its tables are too wide for a terminal."""
    names = [
        name.replace("_", " ") for name, rows in results.items() if name not in ("library", "notes") and rows
    ]
    listed = results.get("notes")
    notes = " ".join(map(str, listed)) if isinstance(listed, list) else ""
    if not names:
        return f"HolisticTraceAnalysis found nothing. {notes}".rstrip()
    found = f"HolisticTraceAnalysis results in the report (`--html F`) and diagnosis.json (`--json F`): {', '.join(names)}."
    return f"{found} {notes}".rstrip()


def _steps_line(diagnosis: Diagnosis) -> str:
    steps = diagnosis.steps
    p95_ms = steps.p95_ms if steps.measured >= _MIN_STEPS_FOR_P95 else None
    pieces = []
    if steps.median_ms is not None and words.lookup(diagnosis.facts, "steps.marked") is False:
        return f"recording of {words.milliseconds(steps.median_ms)}, without step annotations"
    if steps.median_ms is not None and steps.measured == 1:
        pieces.append(f"one step of {words.milliseconds(steps.median_ms)}")
    elif steps.median_ms is not None:
        # The mean is shown too, because costs are shares of it.
        mean, median, p95 = words.in_common_unit(steps.mean_ms, steps.median_ms, p95_ms)
        differs = steps.mean_ms is not None and mean != median
        pieces.append(f"step {f'{mean} mean, ' if differs else ''}{median} median")
        pieces += [f"{p95} p95"] if p95_ms is not None else []
    if steps.samples_per_s is not None:
        of_all = "" if diagnosis.job.world_size == 1 else " in total"
        pieces.append(f"{words.significant(steps.samples_per_s)} samples/s{of_all}")
    if steps.count > 1:
        pieces.append(steps_measured(steps))
    return ", ".join(pieces)


def _print_breakdown(diagnosis: Diagnosis, console: Console) -> None:
    """Print a stacked bar of the critical path with a legend."""
    width = min(console.width, 80) - 1
    shares = [(name, share) for name in PARTS if (share := diagnosis.breakdown.get(name, 0.0)) > 0]
    coloured = console.color_system is not None
    bar, entries = Text(), []
    whole, so_far = sum(share for _, share in shares), 0.0
    for name, share in shares:
        cells = round(width * (so_far + share) / whole) - round(width * so_far / whole)
        so_far += share
        letter, style = PART_MARKS[name]
        bar.append(("█" if coloured else letter) * cells, style=style)
        if cells or share >= 0.005:
            mark = "■ " if coloured else f"{letter} "
            entries.append(
                Text.assemble((mark, style), f"{words.part(name, diagnosis)} {words.percent(share)}")
            )
    console.print()
    alone = 1 in (diagnosis.job.world_size, len(diagnosis.job.ranks_seen))
    waiting = "" if alone else " (where a rank waits: what the slower rank was doing)"
    print_line(console, f"Critical path of the {words.step_label(diagnosis)}{waiting}:", "dim")
    print_wrapped(console, bar)
    for line in _fill_lines(entries, width):
        print_wrapped(console, line)


def _fill_lines(entries: Iterable[Text], width: int) -> list[Text]:
    """Join entries of the legend into lines of at most ``width`` columns without breaking an entry."""
    lines: list[Text] = []
    for entry in entries:
        if lines and lines[-1].cell_len + len(_GAP) + entry.cell_len <= width:
            lines[-1].append(_GAP).append_text(entry)
        else:
            lines.append(entry.copy())
    return lines


def _findings_table(findings: list[Finding], width: int, all_ranks: str, unit: str) -> Table:
    """A table with one row per finding, without empty columns. If the table is too wide, the text of the column "where" is moved
    below the rule's id."""
    # Costs in other units than ``unit`` need a unit in every cell.
    in_cells = any(_has_other_unit(finding) for finding in findings)
    head = [
        *("finding", "who", "cost" if in_cells else unit),
        *(["90 % interval"] if width >= WIDE else []),
        *("speedup", "where"),
    ]
    rows = [_finding_row(each, all_ranks, unit if in_cells else "", wide=width >= WIDE) for each in findings]
    head, *rows = filled_columns([head, *rows])
    needed = _table_width([head, *rows])
    if needed > width and head[-1] == "where":
        head = head[:-1]
        rows = [[f"{row[0]}\n  at {row[-1]}" if row[-1] else row[0], *row[1:-1]] for row in rows]
        needed = _table_width([head, *rows])
    table = plain_table(needed)
    for name in head:
        numbers = name not in ("finding", "who", "where")
        table.add_column(name, justify="right" if numbers else "left", no_wrap=name != "who")
    for finding, row in zip(findings, rows, strict=True):
        style = SEVERITY_STYLES.get(finding.severity, "")
        table.add_row(Text(row[0], style=style), *(Text(cell) for cell in row[1:]))
    return table


def _finding_row(finding: Finding, all_ranks: str, unit: str, *, wide: bool) -> list[str]:
    prefix = words.cost_prefix(finding, "≤ ", "≈ ")
    cells = [
        f"{'↳ ' if finding.caused_by else ''}{finding.rule}",
        words.rank_names(finding.ranks, all_ranks),
        _cost(finding, prefix, unit),
        *([_cost_range(finding, unit)] if wide else []),
        words.speedup_text(finding, prefix),
        location(finding),
    ]
    return [plain(truncated(cell, MAX_CELL_LENGTH)) for cell in cells]


def _has_other_unit(finding: Finding) -> bool:
    """Whether the cost is not shown in milliseconds."""
    cost_ms = finding.costs_ms_per_step
    return finding.costs_s is not None if cost_ms is None else cost_ms >= _MIN_SECONDS_MS


def _cost(finding: Finding, prefix: str, unit: str = "") -> str:
    """The cost in ms per step, or in seconds per run ("8.0 s/run") if there is no cost per step. ``unit``: that of costs in
    milliseconds, "" if the table's head has it."""
    cost_ms = finding.costs_ms_per_step
    if cost_ms is None and finding.costs_s is not None:
        return f"{words.seconds(finding.costs_s)}/run"
    if cost_ms is None:
        return words.NO_COST
    if cost_ms >= _MIN_SECONDS_MS:
        return f"{prefix}{words.milliseconds(cost_ms)}{unit.removeprefix('ms')}"
    return f"{prefix}{words.significant(cost_ms)} {unit}".rstrip()


def _table_width(rows: list[list[str]]) -> int:
    """Width in characters of a table of these rows. The second column may wrap."""
    widest = [
        max(cell_len(line) for cell in cells for line in (cell.split("\n")))
        for cells in zip(*rows, strict=True)
    ]
    widest[1] = min(widest[1], _MAX_RANKS_WIDTH)
    return sum(widest) + PADDING * len(widest)


def _print_hang(diagnosis: Diagnosis, console: Console, verbose: bool) -> None:
    """Print where each rank of a hung job is."""
    _print_rows(console, hang_table(diagnosis) if verbose else hang_table(diagnosis, SHORT_ROWS))
    for stack in stacks(diagnosis) if verbose else []:
        console.print()
        print_line(console, f"{stack.title}:", "bold")
        for line in stack.lines:
            console.print(Text(plain(truncated(f"  {line}"))), soft_wrap=True)


def _print_rows(console: Console, text_table: TextTable | None) -> None:
    """Print a table, if there is one. Rows that begin with an arrow are bold."""
    if text_table is None:
        return
    table = plain_table()
    for name in text_table.head:
        table.add_column(name, no_wrap=name in ("rank", "for", "line"))
    for row in text_table.rows:
        style = "bold" if row[0].startswith("→") else ""
        table.add_row(*(cell(text, style) for text in row))
    console.print()
    print_line(console, text_table.title, "bold")
    print_wrapped(console, table)


def _cost_range(finding: Finding, unit: str) -> str:
    """The 90 % interval of the saving, ms per step; "" if unknown. ``unit``: "" if the table's head has it."""
    if finding.costs_ms_per_step_range is None or finding.at_most:
        return ""
    ends = "–".join(words.significant(end_ms, 2) for end_ms in finding.costs_ms_per_step_range)
    return f"{ends} {unit}".rstrip()


def _print_finding(finding: Finding, console: Console, verbose: bool) -> None:
    console.print()
    print_line(console, finding.title, SEVERITY_STYLES.get(finding.severity, "bold"))
    if finding.explanation:
        blocks = [plain(" ".join(block.split())) for block in truncated(finding.explanation).split("\n\n")]
        print_wrapped(console, Text("\n\n".join(blocks)))
    if verbose:
        for row in finding.evidence[:MAX_LISTED]:
            print_line(console, f"  {evidence_words(row)}: {evidence_value(row)}")
    _print_places(finding, console, verbose)
    for fix in finding.fixes[: MAX_LISTED if verbose else 1]:
        console.print()
        print_line(console, f"{words.fix_label(fix)}: {fix.title}", "bold")
        code = snippet(finding, fix)
        if fix.why and (verbose or not code):
            print_line(console, " ".join(fix.why.split()))
        if code:
            console.print(_highlighted(code, console), soft_wrap=True)
        if fix.trade_off:
            print_line(console, f"Trade-off: {' '.join(fix.trade_off.split())}", "dim")
    if verbose and finding.estimated and finding.limits:
        print_line(console, f"When this can be wrong: {' '.join(finding.limits.split())}", "dim")


def _print_places(finding: Finding, console: Console, verbose: bool) -> None:
    """Print the source lines and their callers; without ``verbose`` only the first one, or one of each rank."""
    for shown in map(place, finding.where[:MAX_LISTED] if verbose else lines_of_ranks(finding)[:_MAX_PLACES]):
        if verbose:
            print_line(console, f"  {shown.rank}at {shown.full} in {shown.function}")
        if shown.callers or ((shown.text or shown.rank) and not verbose):
            print_line(console, f"    called at {shown.called_at}" if verbose else f"  {shown.call_path}")
        for line in shown.text:
            style = "" if line.is_target else "dim"
            console.print(
                Text(
                    plain(truncated(f"  {'>' if line.is_target else ' '} {line.number:5} {line.text}")),
                    style=style,
                ),
                soft_wrap=True,
            )
    reasons = [reason for where in finding.where[:MAX_LISTED] if (reason := place(where).text_missing)]
    for reason in dict.fromkeys(reasons) if verbose else ():
        print_line(console, f"  (no text: {reason})", "dim")


def _highlighted(code: str, console: Console) -> Text:
    """The snippet, indented and highlighted."""
    shown = plain_lines(truncated(code).replace("\t", "    "))
    lines = "\n".join(f"  {line}".rstrip() for line in shown.split("\n"))
    if console.color_system is None:
        return Text(lines)
    from rich.syntax import Syntax

    highlighted = Syntax(lines, "python", theme="ansi_dark", background_color="default").highlight(lines)
    highlighted.rstrip()
    return highlighted


def _print_notes_and_checks(diagnosis: Diagnosis, console: Console, verbose: bool) -> None:
    notes = diagnosis.notes[: MAX_LISTED if verbose else NOTES]
    if notes:
        console.print()
    for note in notes:
        print_line(console, f"Note: {note}", "dim")
    if len(notes) < len(diagnosis.notes):
        print_line(
            console, f"`-v` shows {words.count(len(diagnosis.notes) - len(notes), 'more note')}", "dim"
        )
    if diagnosis.checked or diagnosis.skipped:
        console.print()
        print_line(
            console, words.checks_summary(diagnosis, more="" if verbose else " (`-v` says why)"), "dim"
        )
    for line in words.skipped_by_reason(diagnosis)[:MAX_LISTED] if verbose else []:
        print_line(console, f"  {line}", "dim")
