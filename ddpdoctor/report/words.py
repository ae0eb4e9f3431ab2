"""Formats numbers, ranks and parts of a step as text. Missing values are shown as "not recorded", never as 0."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddpdoctor.diagnose.diagnosis import RUNNING, Diagnosis, Finding, Fix
from ddpdoctor.diagnose.facts_view import lookup
from ddpdoctor.diagnose.rule_texts import ordinal
from ddpdoctor.measure.taxonomy import Component, Part
from ddpdoctor.rundir import runs_of

ABSENT = "not recorded"
NO_COST = "–"
"""Shown for a finding without a cost of its own."""
_UNIT = re.compile(r"_(ms|us|ns|s|bytes|percent|share)$")
_MAX_SPEEDUP = 10
"""Larger speedups are shown as "over 10×"."""
_MIN_SPEEDUP = 1.005
"""Smaller ones would be shown as "1.00×"."""
_MAX_EXACT_INTEGER = 1e15
"""Below this, floats represent all integers exactly."""
_MAX_RUNS = 64
"""Maximum number of listed ranges of consecutive ranks."""
_ACRONYM = re.compile(r"\b(gpu|cpu|ddp|sm|h2d|nccl)\b")

_STOPPED = {"hangs": "hung", "failed": "failed"}
"""Texts by the fact ``hang.state``."""
_NOT_ENDED = {
    RUNNING: "is still running",
    "killed": "was killed",
    "cut off": "was cut off",
    "unknown": "has no recorded end",
}
"""Texts by ``end`` of the job."""
RUN_LABELS = {
    name: name.replace("_", " ")
    for name in (
        *("start", "earlier_attempts", "preparation", "first_batch", "warm_up", "steps", "some_steps"),
        *("epochs", "evaluation", "checkpoint", "pauses", "suspended", "profiler", "unrecorded"),
        *("other_trainings", "later_attempts", "end"),
    )
} | {
    "warm_up": "warm-up",
    "some_steps": "extra time of periodic steps",
    "epochs": "epoch boundaries",
    "unrecorded": "not recorded",
}
"""Labels of the parts of the run, in order, by NAME of the facts ``run.NAME_s``."""
PART_LABELS: dict[str, str] = {
    Part.DATA_WAIT: "waiting for data",
    Part.H2D: "copy to device",
    Part.COMPUTE: "compute",
    Part.COMM_WAIT: "waiting for other ranks",
    Part.COMM_TRANSFER: "communication",
    Part.BARRIER: "barrier",
    Part.HOST: "host work",
    Part.CHECKPOINT: "checkpoint",
    Part.OTHER: "other or not recorded",
    Component.FORWARD: "forward",
    Component.BACKWARD: "backward",
    Component.OPTIMIZER: "optimizer",
    **RUN_LABELS,
}
"""Labels of the parts of the breakdown, of the kinds of spans and of the parts of the run."""

RECORDINGS = {
    "host-log": "The step logs",
    "device-log": "The step logs, in device time",
    "window": "The profiler window",
}
"""Labels of the recordings from which causes can be measured, see :class:`ddpdoctor.measure.summary.Speaker`."""

EXCLUDED = {
    "thinned": "recorded briefly to limit overhead",
    "no collective that all ranks share": "without a collective that every rank recorded",
    "no measured step before it": "directly after an excluded step",
    "no step before it in the window": "at the start of the profiler window",
    "evaluation": "with an evaluation",
    "disturbed by the profiler": "slowed by starting or stopping the profiler",
    "inside the profiled window": "with the profiler active",
    "no collectives matched": "without matched collectives",
    "single pause": "in or directly after a pause",
}
"""Labels of the reasons for excluding steps, to follow a number of steps. Other reasons are shown unchanged."""

_MIN_DRAWN_SHARE = 0.001
"""Minimum share of the wall time for a part of its own; smaller parts are combined as "other"."""
_MIN_WALL_S = 1e-200
"""Shorter wall times count as unknown."""

PERSISTENCE = {
    "always": "in nearly every step examined",
    "range": "in consecutive steps",
    "periodic": "at regular intervals",
    "random": "in some steps, without a pattern",
    "once": "in single steps",
    "growing": "a little more in each step",
}


def significant(value: float, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits, without an exponent between 10^-4 and 10^15."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    if places <= 0:
        return f"{round(value, places):,.0f}"
    if places > digits + 3:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{places}f}"


def milliseconds(value: float | None) -> str:
    """A duration given in milliseconds, in µs, ms, s, or minutes and hours depending on its size."""
    if value is None:
        return ABSENT
    size = abs(value)
    if size >= 60_000:
        return seconds(value / 1e3)
    if size >= 1000:
        return f"{significant(value / 1e3)} s"
    if size < 0.1 and value != 0:
        return f"{significant(value * 1e3)} µs"
    return f"{significant(value)} ms"


def in_common_unit(*values_ms: float | None) -> list[str]:
    """Durations given in milliseconds, in comparable units: all in seconds if one of them is a second or longer."""
    if max((value for value in values_ms if value is not None), default=0.0) < 1000:
        return [milliseconds(value) for value in values_ms]
    return [ABSENT if value is None else seconds(value / 1e3) for value in values_ms]


def seconds(value: float | None) -> str:
    """A duration given in seconds: "8.2 s", "3 min 12 s", "2 h 5 min"."""
    if value is None:
        return ABSENT
    if abs(value) < 60:
        return f"{significant(value)} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def percent(share: float | None) -> str:
    """A share (0 to 1) in per cent."""
    if share is None:
        return ABSENT
    value = share * 100
    if abs(value) >= 9.95 or value == 0:
        return f"{value or 0.0:.0f} %"
    return f"{value:.1f} %" if abs(value) >= 0.1 else "under 0.1 %" if value > 0 else f"{value:.2g} %"


def speedup(value: float | None) -> str:
    """A speedup factor as text: "7.1×"."""
    return ABSENT if value is None else f"{value:.2f}×" if value < 3 else f"{significant(value, 2)}×"


def cost_in_total(finding: Finding) -> str:
    """The cost of time lost outside of ordinary steps: "20.1 s in total"; "" for costs per step, or if it is unknown."""
    if finding.costs_ms_per_step is not None or finding.costs_s is None:
        return ""
    return f"{seconds(finding.costs_s)} in total"


def speedup_text(finding: Finding, prefix: str = "") -> str:
    """The speedup if the finding is fixed: "7.1×" after ``prefix``, such as "≤ " or "about ". "" if there is none.

    Above 10 it is "over 10×", because an error of 1 % in the share could double it, or "" for an upper bound.
    """
    value = finding.speedup_if_fixed
    if value is None or value < _MIN_SPEEDUP or (finding.at_most and value > _MAX_SPEEDUP):
        return ""
    return _capped_speedup(value) if value > _MAX_SPEEDUP else prefix + speedup(value)


def cost_prefix(finding: Finding, upper_bound: str = "at most ", estimate: str = "about ") -> str:
    """The prefix of a finding's cost: ``upper_bound`` for an upper bound, ``estimate`` for an estimate based on an assumption, else ""."""
    return upper_bound if finding.at_most else estimate if finding.estimated else ""


def _capped_speedup(value: float) -> str:
    return f"over {_MAX_SPEEDUP}×" if value > _MAX_SPEEDUP else speedup(value)


def cost_range(finding: Finding) -> str:
    """The 90 % interval of the saving: "27 to 36 ms"; "" if it is unknown or the saving is an upper bound."""
    if finding.costs_ms_per_step_range is None or finding.at_most:
        return ""
    low, high = (strip_zeros(milliseconds(end_ms)) for end_ms in finding.costs_ms_per_step_range)
    amount, _, unit = low.partition(" ")
    return f"{amount if high.endswith(f' {unit}') else low} to {high}"


def speedup_range(finding: Finding) -> str:
    """The 90 % interval of the speedup: "1.41 to 1.66×"; "" if it is unknown or the saving is an upper bound."""
    if finding.speedup_if_fixed_range is None or finding.at_most:
        return ""
    low, high = (_capped_speedup(end) for end in finding.speedup_if_fixed_range)
    return "" if low == high else f"{low.removesuffix('×')} to {high}"


def in_parentheses(text: str) -> str:
    """``text`` in parentheses after a space; "" for an empty text."""
    return f" ({text})" if text else ""


def size(value: float | None) -> str:
    """Bytes with a binary unit."""
    if value is None:
        return ABSENT
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else strip_zeros(f"{significant(value)} {unit}")
        value /= 1024
    return strip_zeros(f"{significant(value)} TiB")


def strip_zeros(text: str) -> str:
    """``text`` without trailing zeros of decimal fractions: "60 ms" for "60.0 ms"."""
    return re.sub(r"\.\d+", lambda match: match[0].rstrip("0").rstrip("."), text)


def quantity(value: Any, unit: str) -> str:
    """Any recorded value with its unit. The keys of a mapping are ranks."""
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(value, unit)
    if isinstance(value, Mapping):
        return (
            ", ".join(f"rank {rank}: {quantity(rank_value, unit)}" for rank, rank_value in value.items())
            or "none"
        )
    if isinstance(value, Sequence) and not isinstance(value, str):
        return (
            ", ".join(quantity(item, "") for item in value) + (f" {unit}" if unit else "")
            if value
            else "none"
        )
    return f"{value} {unit}".strip()


def _number(value: float, unit: str) -> str:
    known: dict[str, Callable[[float], str]] = {
        "ms": milliseconds,
        "µs": lambda value: milliseconds(value / 1e3),
        "s": seconds,
        "share": percent,
        "bytes": size,
        **dict.fromkeys(("×", "x", "times"), speedup),
        "version": "{:.1f}".format,
    }
    if unit in known:
        return known[unit](value)
    if unit.startswith("ms per "):
        return f"{milliseconds(value)} {unit.removeprefix('ms ')}"
    if unit.startswith("bytes per "):
        return f"{size(value)} {unit.removeprefix('bytes ')}"
    if unit in ("percent", "%"):
        return percent(value / 100)
    # Counts may be floats.
    is_count = not unit or unit.startswith("per ")
    is_integer_value = isinstance(value, int) or (
        is_count and value.is_integer() and abs(value) < _MAX_EXACT_INTEGER
    )
    text = f"{value:,.0f}" if is_integer_value else significant(value)
    return f"{text} {unit}".strip()


def rank_numbers(ranks: Iterable[int]) -> str:
    """Rank numbers, with consecutive ones joined: "0–2, 5". At most 64 ranges, then "and 100 more"."""
    runs = runs_of(ranks)
    text = ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:_MAX_RUNS])
    more = sum(map(len, runs[_MAX_RUNS:]))
    return f"{text} and {more:,} more" if more else text


def all_ranks_label(diagnosis: Diagnosis) -> str:
    """The name for all recorded ranks: "all ranks", "all 5 recorded", "rank 3" if it is the only one."""
    seen, world = _ranks_recorded(diagnosis), diagnosis.job.world_size
    if seen == 1:
        only = diagnosis.job.ranks_seen if world is not None else []
        return f"rank {only[0]}" if len(only) == 1 else "the recorded rank"
    if world is None or not 0 < seen < world:
        return "all ranks"
    return "both recorded" if seen == 2 else f"all {seen:,.0f} recorded"


def who(finding: Finding, diagnosis: Diagnosis) -> str:
    """The ranks of a finding, with a remark if no other rank of the job was recorded: "rank 1 (the only rank recorded)"."""
    names = rank_names(finding.ranks, all_ranks_label(diagnosis))
    world, seen = diagnosis.job.world_size, diagnosis.job.ranks_seen
    is_only = world is not None and world > 1 and len(seen) == 1 and _ranks_recorded(diagnosis) == 1
    return f"{names} (the only rank recorded)" if is_only and names == f"rank {seen[0]}" else names


def stopped(diagnosis: Diagnosis) -> str | None:
    """How a job ended that did not complete, to follow "the job": "hung", "failed", "was killed", "was cut off", "is still running",
    "has no recorded end". None for a job that completed or was stopped by its user, and for traces."""
    return _STOPPED.get(str(lookup(diagnosis.facts, "hang.state"))) or _NOT_ENDED.get(diagnosis.job.end or "")


def why_not_passed(diagnosis: Diagnosis) -> str | None:
    """Why a job without a severe finding does not count as passed, without a final full stop; None if it does."""
    if (end := stopped(diagnosis)) is not None:
        return f"the job {end}; a job that did not complete does not count as passed"
    if diagnosis.verdict.rule is None and not diagnosis.healthy:
        return diagnosis.verdict.headline.rstrip(".")
    return None


def step_label(diagnosis: Diagnosis) -> str:
    """The unit to which critical path and costs refer: "mean step", "step" if only one was measured, "recording" if steps are not
    marked."""
    if lookup(diagnosis.facts, "steps.marked") is False:
        return "recording"
    return "step" if diagnosis.steps.measured == 1 else "mean step"


def per_step(diagnosis: Diagnosis) -> str:
    """ " per step", to follow a cost; "" if the recording marks no steps."""
    return "" if step_label(diagnosis) == "recording" else " per step"


def fix_label(fix: Fix, change: str = "Fix") -> str:
    """The label before the title of a fix: ``change``, or "To do" if it is a step to find the cause."""
    return "To do" if fix.investigates else change


def rank_names(ranks: Sequence[int] | None, all_ranks: str) -> str:
    """Ranks as text: "rank 3", "ranks 0–2"; ``all_ranks`` for None."""
    if ranks is None:
        return all_ranks
    if not ranks:
        return "no rank in particular"
    return f"{'rank' if len(set(ranks)) == 1 else 'ranks'} {rank_numbers(ranks)}"


def count(number: int, noun: str) -> str:
    """ "1 step", "118 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def restarts(diagnosis: Diagnosis) -> int:
    """Number of attempts of the job that failed and were followed by another one."""
    return int(number_fact(diagnosis, "run.restarts.count") or 0)


def checks_summary(diagnosis: Diagnosis, more: str = "") -> str:
    """Numbers of rules without a finding: "26 checks found nothing; 3 do not apply; 14 lacked data." ``more`` is inserted before the
    full stop if rules were skipped."""
    lacking = sum(rule.applies for rule in diagnosis.skipped)
    others = len(diagnosis.skipped) - lacking
    parts = [f"{count(len(diagnosis.checked), 'check')} found nothing"] if diagnosis.checked else []
    parts += [f"{others} {'does' if others == 1 else 'do'} not apply"] if others else []
    parts += [f"{lacking if parts else count(lacking, 'check')} lacked data"] if lacking else []
    return f"{'; '.join(parts)}{more if diagnosis.skipped else ''}."


def skipped_by_reason(diagnosis: Diagnosis) -> list[str]:
    """A line per reason for skipping rules, lack of data first: the reason, the number of rules, and their ids."""
    by_reason: dict[tuple[bool, str], list[str]] = {}
    for rule in sorted(diagnosis.skipped, key=lambda rule: not rule.applies):
        by_reason.setdefault((rule.applies, rule.why), []).append(rule.rule)
    return [
        f"{'' if applies else 'does not apply: '}{why} ({count(len(rules), 'check')}): {', '.join(rules)}"
        for (applies, why), rules in by_reason.items()
    ]


def has_all_ranks(diagnosis: Diagnosis) -> bool:
    """Whether all ranks of the job were recorded, or their number is unknown. If not, transfer and waiting cannot be separated."""
    world = diagnosis.job.world_size
    return world is None or _ranks_recorded(diagnosis) >= world


def _ranks_recorded(diagnosis: Diagnosis) -> float:
    """Number of ranks in the recording from which causes are measured; other recordings may have more ranks."""
    seen = lookup(diagnosis.facts, "job.ranks_seen")
    return seen if isinstance(seen, (int, float)) and seen else len(diagnosis.job.ranks_seen)


def part(name: str, diagnosis: Diagnosis | None = None) -> str:
    """The label of a part of the breakdown or of the run. Communication is "communication or waiting" if ``diagnosis`` lacks ranks of the
    job; the time of periodic steps has their period."""
    if name == Part.COMM_TRANSFER and diagnosis is not None and not has_all_ranks(diagnosis):
        return "communication or waiting"
    every = None if diagnosis is None else number_fact(diagnosis, "run.periodic.every")
    if name == "some_steps" and every and every.is_integer():
        return f"extra time of every {ordinal(every)} step"
    return PART_LABELS.get(name, name.replace("_", " "))


def number_fact(diagnosis: Diagnosis, path: str) -> float | None:
    """A numeric fact by its path; None if it is not a finite number, because a diagnosis from a file may contain any value."""
    value = lookup(diagnosis.facts, path)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def numbers_fact(diagnosis: Diagnosis, path: str) -> dict[str, float]:
    """A fact that is a mapping of names to numbers, without values that are not finite numbers; {} if it is not a mapping."""
    value = lookup(diagnosis.facts, path)
    names = value if isinstance(value, dict) else {}
    found = {str(name): number_fact(diagnosis, f"{path}.{name}") for name in names}
    return {name: number for name, number in found.items() if number is not None}


def run_parts(
    diagnosis: Diagnosis, min_share: float = _MIN_DRAWN_SHARE, min_other_share: float = _MIN_DRAWN_SHARE
) -> dict[str, float]:
    """Seconds by part of the run, in order. Parts below the share ``min_share`` of the wall time are combined as "other", which is omitted
    if it is below ``min_other_share``. Empty if the wall time is unknown."""
    wall_s = number_fact(diagnosis, "run.wall_s")
    if wall_s is None or wall_s < _MIN_WALL_S:
        return {}
    parts_s = {part: number_fact(diagnosis, f"run.{part}_s") or 0.0 for part in RUN_LABELS}
    parts_shown = {part: min(value, wall_s) for part, value in parts_s.items() if value >= min_share * wall_s}
    other_s = wall_s - sum(parts_shown.values())
    return {**parts_shown, "other": other_s} if other_s >= min_other_share * wall_s else parts_shown


def fact(path: str) -> str:
    """The path of a fact as text, for facts without a description: "GPU: kernels per step"."""
    group, _, name = path.rpartition(".")
    text = f"{group.replace('.', ' ')}: {_UNIT.sub('', name)}".removeprefix(": ").replace("_", " ")
    text = _ACRONYM.sub(lambda found: found[0].upper(), text)
    return text[:1].upper() + text[1:]


def nonbreaking_units(text: str) -> str:
    """``text`` with no-break spaces between numbers and units."""
    return re.sub(r"(?<=\d) (?=(?:%|µs|ms|s|min|h|B|KiB|MiB|GiB|TiB|GB/s)(?!\w))", "\u00a0", text)


def split_code(text: str) -> list[tuple[str, bool]]:
    """``text`` split at its backticks: (piece, is code). With an odd number of backticks it stays one piece."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return [(text, False)]
    return [(piece, bool(index % 2)) for index, piece in enumerate(parts) if piece]


def strip_backticks(text: str) -> str:
    """``text`` without the backticks around code, for places that cannot format code, such as page titles."""
    return "".join(piece for piece, _ in split_code(text))


def paragraphs(text: str) -> list[list[tuple[str, bool]]]:
    """The paragraphs of ``text``, separated by empty lines, each split by :func:`split_code`."""
    blocks = [" ".join(block.split()) for block in text.split("\n\n")]
    return [split_code(block) for block in blocks if block]
