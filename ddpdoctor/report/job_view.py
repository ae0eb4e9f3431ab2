"""Formats the job, its settings and nested results as titled tables."""

from __future__ import annotations

import os.path
import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, Job, WindowCost
from ddpdoctor.report import words
from ddpdoctor.rundir import listed
from ddpdoctor.rundir.packages import LIBRARY

ROWS = 200
"""Maximum number of rows shown of a nested group; the report's data has all."""

BUILT_AT = "line"
"""Name of the row with the line that built an object; for an optimizer, the line that first called step()."""

GROUPS, ALL_GROUPS = 8, 100
"""Maximum number of groups shown of a list, and of all settings together."""
TABLES, COLUMNS = 64, 64
"""Maximum number of tables of HolisticTraceAnalysis, and of columns per table."""


DEFAULTS: dict[str, Any] = {
    "bucket_cap_bytes": 25 * 1024**2,
    "broadcast_buffers": True,
    "comm_hook": None,
    **dict.fromkeys(("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "join"), False),
    "num_workers": 0,
    "batch_size": 1,
    "collate": "default_collate",
    "in_order": True,
    **dict.fromkeys(("pin_memory", "persistent_workers", "drop_last"), False),
    **dict.fromkeys(("prefetch_factor", "multiprocessing_context", "foreach", "fused"), None),
    "autocast": None,
    "matmul_precision": "highest",
    "sharded": False,
}
"""Default values of the settings of DDP, DataLoader, optimizers and torch."""


class Table(msgspec.Struct, frozen=True):
    """A titled table. If the head is empty, the rows are pairs of name and value."""

    title: str
    head: list[str]
    rows: Sequence[Sequence[str]]
    styles: list[str] = []
    """A style per row; [] for the default style."""
    folded: bool = False


def job_groups(diagnosis: Diagnosis) -> list[Table]:
    """All that is known about the job, in groups, without unknown values and empty groups. Only the job itself and the settings that
    it changed or a finding reads are not folded."""
    job = diagnosis.job
    facts_used = {evidence.fact for finding in diagnosis.findings for evidence in finding.evidence}
    # The version of ddpdoctor that recorded, only if another one analysed.
    own_version = ("ddpdoctor", diagnosis.tool_version)
    versions = [row for row in sorted(job.versions.items()) if row != own_version]
    groups = [
        Table("Job", [], [*_job_rows(job), *versions]),
        Table(
            "Settings changed from their defaults, or read by a finding",
            [],
            _relevant_settings(job.settings, facts_used),
        ),
        *(Table(title, [], rows, folded=True) for title, rows in settings_groups(job.settings)[:ALL_GROUPS]),
        Table("Environment", [], sorted(job.environment.items()), folded=True),
        Table("Analysis", [], _analysis_rows(diagnosis), folded=True),
    ]
    return [group for group in groups if group.rows]


def _relevant_settings(settings: Mapping[str, Any], facts_used: Collection[str]) -> list[tuple[str, str]]:
    """A row per object with settings that differ from :data:`DEFAULTS` or whose fact is in ``facts_used``: "loaders: num_workers 4"."""
    fields_used = {fact.rpartition(".")[2] for fact in facts_used}
    rows = []
    for title, values in settings_groups(settings):
        known = dict(values)
        shown = [
            f"{name} {value}"
            for name, value in known.items()
            if name in DEFAULTS and (name in fields_used or value not in (text(DEFAULTS[name]), words.ABSENT))
        ]
        where = words.in_parentheses(known.get(BUILT_AT, ""))
        rows += [(f"{title}{where}", ", ".join(shown))] if shown else []
    return rows[:ROWS]


def _job_rows(job: Job) -> list[tuple[str, str]]:
    rows = [
        ("World size", "" if job.world_size is None else words.count(job.world_size, "rank")),
        ("Ranks recorded", words.rank_numbers(job.ranks_seen)),
        ("Ranks missing", words.rank_numbers(job.missing_ranks)),
        ("Hosts", _counted_names(job.hosts)),
        ("Backend", job.backend or ""),
        ("Device", job.device or ""),
        ("Device names", _counted_names(job.device_names)),
        ("Command", command_line(job.command)),
        ("Started", _utc_time(job.started_ns)),
        ("Duration", "" if job.duration_s is None else words.seconds(job.duration_s)),
        ("Launcher exit code", "" if job.exit_code is None else str(job.exit_code)),
    ]
    return [(name, value) for name, value in rows if value]


def _analysis_rows(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    steps, speaker = diagnosis.steps, diagnosis.speaker
    excluded = ", ".join(
        f"{words.EXCLUDED.get(reason, reason)}: {count:,}"
        for reason, count in steps.set_aside.items()
        if count
    )
    rows = [
        ("ddpdoctor", diagnosis.tool_version),
        ("Created", _utc_time(diagnosis.created_ns)),
        ("Analyzed", ", ".join(diagnosis.source)),
        (
            "Steps",
            f"{steps.measured:,} measured of {steps.count:,} (from {steps.source})" if steps.count else "",
        ),
        ("Steps excluded", excluded),
        (
            "Causes measured by",
            f"{words.RECORDINGS.get(speaker.recording, speaker.recording)}. {speaker.why}" if speaker else "",
        ),
        ("Profiler window", _window(steps.window)),
        ("Schema", diagnosis.schema),
    ]
    return [(name, value) for name, value in rows if value]


def _window(window: WindowCost | None) -> str:
    if window is None:
        return ""
    return (
        f"steps {window.first:,} to {window.last:,}, {words.milliseconds(window.step_ms)} each; opening, recording and "
        f"closing it took {words.milliseconds(window.extra_ms)} longer than unprofiled steps, once"
    )


def settings_groups(settings: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Settings by group: plain values first, then each mapping; a list of mappings becomes numbered groups."""
    plain, grouped = [], []
    for name, value in settings.items():
        title = name.replace("_", " ")
        if isinstance(value, Mapping):
            grouped.append((title, flat(_without_id(value))))
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            numbered = [
                (f"{title} {index}" if len(value) > 1 else title, item) for index, item in enumerate(value, 1)
            ]
            grouped += [(label, flat(_without_id(item))) for label, item in numbered[:GROUPS]]
        else:
            plain.append((name, text(value)))
    return ([("Settings", plain)] if plain else []) + grouped


def _without_id(value: Mapping[str, Any]) -> dict[str, Any]:
    """An object that the job built, without its id. Its line is kept only if it is text: older files have a line number there."""
    named = {BUILT_AT if name == "where" else name: item for name, item in value.items() if name != "id"}
    if not isinstance(named.get(BUILT_AT), str):
        named.pop(BUILT_AT, None)
    return named


def flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(Dotted name, text) of the values of nested mappings, at most :data:`ROWS`."""
    rows: list[tuple[str, str]] = []
    for name, item in value.items():
        if isinstance(item, Mapping):
            rows += flat(item, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", text(item)))
        if len(rows) >= ROWS:
            break
    return rows[:ROWS]


def text(value: Any) -> str:
    """Any JSON value as one line of text, shortened."""
    if isinstance(value, Mapping):
        shown = ", ".join(f"{name} {text(item)}" for name, item in list(value.items())[:12])
        return shown + (" …" if len(value) > 12 else "")
    if isinstance(value, Sequence) and not isinstance(value, str):
        shown = ", ".join(text(item) for item in value[:12])
        return shown + (" …" if len(value) > 12 else "") or "none"
    line = words.quantity(value, "")
    return line if len(line) <= 400 else f"{line[:400]} …"


def hta_tables(results: Mapping[str, Any] | None) -> list[Table]:
    """Results of HolisticTraceAnalysis: lists of records as tables, everything else as names and values."""
    tables = []
    for name, value in list((results or {}).items())[:TABLES]:
        title = name.replace("_", " ")
        if (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and value
            and isinstance(value[0], Mapping)
        ):
            shown = [record for record in value[:ROWS] if isinstance(record, Mapping)]
            head = list(dict.fromkeys(str(key) for record in shown for key in record))[:COLUMNS]
            body = [[text(record[key]) if key in record else "" for key in head] for record in shown]
            tables.append(Table(title, [key.replace("_", " ") for key in head], body))
        elif isinstance(value, Mapping):
            tables.append(Table(title, [], flat(value)))
        else:
            tables.append(Table(title, [], [("", text(value))]))
    return tables


def command_line(command: Sequence[str]) -> str:
    """The command, quoted for a shell; "" if it is unknown."""
    return shlex.join(command)


def _counted_names(names: Sequence[str]) -> str:
    """Up to 12 names with their number of occurrences."""
    counted = Counter(names)
    return listed([f"{count} × {name}" if count > 1 else name for name, count in counted.items()], 12)


def _utc_time(nanoseconds: int | None) -> str:
    if nanoseconds is None:
        return ""
    try:
        moment = datetime.fromtimestamp(nanoseconds / 1e9, tz=timezone.utc)
    except (OverflowError, OSError, ValueError):
        return ""
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def project_root(diagnosis: Diagnosis) -> str | None:
    """The deepest folder that contains all of the user's source files in ``diagnosis``; None if it is / or no path is absolute."""
    files = [
        place.file for finding in diagnosis.findings for where in finding.where for place in where.call_path
    ]
    files += [word for word in diagnosis.job.command if word.endswith(".py")]
    folders = [
        name.rpartition("/")[0] or os.sep
        for name in files
        if name.startswith("/") and not LIBRARY.match(name)
    ]
    if not folders:
        return None
    common = os.path.commonpath(folders)
    return common if common != os.sep else None
