"""Where each rank of a hung job is: one table, and the stacks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, Standing
from ddpdoctor.report import words
from ddpdoctor.report.finding_view import place
from ddpdoctor.report.job_view import Table

ROWS = 64
"""Most ranks in the table; all are in the report's data."""
FRAMES = 500
"""Most lines of a stack."""
SHORT_ROWS = 12
"""Most ranks in the short table."""


class Stack(msgspec.Struct, frozen=True):
    """The stack of a rank's training thread, innermost frame first."""

    title: str
    lines: list[str]


def hang_table(diagnosis: Diagnosis, most: int = ROWS) -> Table | None:
    """One row per rank, ranks at fault first; None if the job did not hang. Columns without any value are omitted."""
    if not diagnosis.standing:
        return None
    shown = _first(diagnosis.standing, most)
    columns = [
        ("rank", [f"{'→ ' if each.guilty else ''}{each.rank}" for each in shown]),
        ("host", [each.host or words.ABSENT for each in shown]),
        ("step", [words.ABSENT if each.step is None else str(each.step) for each in shown]),
        ("in", [each.phase or words.ABSENT for each in shown]),
        ("state", [each.state or words.ABSENT for each in shown]),
        ("for", [words.seconds(each.since_s) for each in shown]),
        ("collective", [each.collective or words.ABSENT for each in shown]),
        ("line", [place(each.where).short if each.where else words.ABSENT for each in shown]),
    ]
    several = len({each.host for each in shown}) > 1
    known = [
        (name, cells)
        for name, cells in columns
        if set(cells) != {words.ABSENT} and (name != "host" or several)
    ]
    left = len(diagnosis.standing) - len(shown)
    hang = diagnosis.facts.get("hang")
    lasts = hang.get("lasts") if isinstance(hang, dict) else None
    title = "Where each rank is" if lasts else "Where each rank was last seen"
    if isinstance(hang, dict) and hang.get("only_dumps"):
        title = "What each rank waits in, by its flight recorder dump"
    if any(each.guilty for each in shown):
        title += "; → named above"
    if left:
        states = {each.state for each in _first(diagnosis.standing, len(diagnosis.standing))[most:]}
        alike = next(iter(states)) if len(states) == 1 else None
        where = "`-v` shows" if most < ROWS else "`--json F` has"
        title += f" ({left} more{f', each {alike}' if alike else ''}: {where} all)"
    rows = [list(row) for row in zip(*(cells for _, cells in known), strict=True)]
    return Table(title, [name for name, _ in known], rows)


def stacks(diagnosis: Diagnosis) -> list[Stack]:
    """The recorded stacks, those of ranks at fault first."""
    return [
        Stack(
            f"Rank {each.rank}{', at fault' if each.guilty else ''}",
            [f"{line.file}:{line.line} {line.function}" for line in each.stack[:FRAMES]],
        )
        for each in _first(diagnosis.standing, ROWS)
        if each.stack
    ]


def _first(standing: Sequence[Standing], most: int) -> list[Standing]:
    return sorted(standing, key=lambda each: (not each.guilty, each.rank))[:most]
