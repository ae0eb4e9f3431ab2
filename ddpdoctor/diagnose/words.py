"""The Jinja2 environment of the rule texts: numbers with units, ranks, lines and repetition in words."""

from __future__ import annotations

import functools
import math
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddpdoctor.nearest import did_you_mean
from ddpdoctor.plain import plain
from ddpdoctor.rundir import ranks_in_words

if TYPE_CHECKING:
    import jinja2


def ms(value: float) -> str:
    """0.42 -> "0.42 ms", 46.3 -> "46 ms", 1230 -> "1.23 s", 18000000 -> "5 hours"."""
    if value >= 1e6:
        return hours(value / 3.6e6)
    if value >= 1000:
        return f"{value / 1000:.3g} s"
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


def percent(share: float) -> str:
    """0.423 -> "42 %"."""
    return f"{share * 100:.0f} %" if share >= 0.1 else f"{share * 100:.2g} %"


def size(value: float) -> str:
    """Bytes with a binary prefix: 26214400 -> "25 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def hours(value: float) -> str:
    """0.01 -> "36 seconds", 0.25 -> "15 minutes", 2.0 -> "2 hours", 100.0 -> "4 days"."""
    if value < _SECONDS_TO_HOURS:
        return count(max(1.0, round(3600 * value)), "second")
    if value < 1:
        return count(round(60 * value), "minute")
    return count(round(value), "hour") if value < _DAYS_FROM_HOURS else count(round(value / 24), "day")


_SECONDS_TO_HOURS, _DAYS_FROM_HOURS = 0.025, 48
"""Below the one, 90 seconds, seconds are told, from the other on days."""
_NAME = re.compile(r"[\w.:<>]+")
"""An operation that needs no quotation marks in a sentence."""
_LEAST_TOLD = 0.005
_DIFFERS = 0.2
_NOTHING = 0.01
"""A saving below this part of the cost counts as none."""


def number(value: float) -> str:
    """4.0 -> "4", 4.27 -> "4.3", 0.0004 -> "0": what is counted is not told to a ten thousandth."""
    return (
        f"{value:.0f}" if value >= 10 or abs(value) < _LEAST_TOLD or value == round(value) else f"{value:.2g}"
    )


def ordinal(value: float) -> str:
    """1.0 -> "1st", 2 -> "2nd", 10 -> "10th", 21 -> "21st"."""
    number = round(value)
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


def count(value: float, noun: str) -> str:
    """Return "1 thread", "16 threads"."""
    return f"{number(value)} {noun}" + ("" if value == 1 else "s")


def ranks(culprits: Sequence[int] | None, job: Mapping[str, Any] | None = None) -> str:
    """[1] -> "rank 1", [1, 3, 5] -> "ranks 1, 3 and 5", [0, 8, 9, 10] -> "ranks 0 and 8 to 10", None -> "all ranks", or of a ``job``
    of which not all were recorded "all 5 recorded ranks"; long lists are cut."""
    if not culprits:
        return _all_of(job or {})
    return ranks_in_words(culprits)


def verb(culprits: Sequence[int] | None, one: str, many: str, job: Mapping[str, Any] | None = None) -> str:
    """Return the verb's form that agrees with :func:`ranks`."""
    return one if (len(culprits) == 1 if culprits else _is_one(job or {})) else many


def everybody(job: Mapping[str, Any], many: str, one: str) -> str:
    """Who shares what all recorded ranks do, with the verb: "All ranks wait", "All 5 recorded ranks wait", "The one recorded rank
    waits", or of a job of one rank "The training process waits"."""
    return sentence(f"{_all_of(job)} {one if _is_one(job) else many}")


def _all_of(job: Mapping[str, Any]) -> str:
    """What all ranks are called of which something is known. How many there are may not be known."""
    seen, world = job.get("ranks_seen") or 0, job.get("world_size")
    if world == 1:
        return "the training process"
    if seen == 1:
        return "the one recorded rank"
    if world is None or not 0 < seen < world:
        return "all ranks"
    return "both recorded ranks" if seen == 2 else f"all {seen:.0f} recorded ranks"


def _is_one(job: Mapping[str, Any]) -> bool:
    return job.get("world_size") == 1 or job.get("ranks_seen") == 1


def stopped(hang: Mapping[str, Any], colon: str = "") -> str:
    """How a job stopped, as what follows "The job": "hangs", "seems to hang" where a rank computes, "failed", "hung for 310 s until it
    was killed", "hung" of flight recorder dumps. With a ``colon`` what its ranks do may follow: "hung for 310 s; last seen:"."""
    if hang["state"] == "failed":
        return f"failed{colon}"
    if hang["lasts"] is None:
        return f"hung{colon}"
    if hang["lasts"]:
        # A long computation looks the same.
        computes = (hang["not_reached"] or {}).get("doing") == "loop"
        return f"{'seems to hang' if computes else 'hangs'}{colon}"
    lasted = f" for {ms(hang['since_s'] * 1000)}" if hang["since_s"] else ""
    ended = f" until {hang['until']}" if hang["until"] else ""
    return f"hung{lasted}{ended}{colon and '; last seen'}{colon}"


def condition(culprits: Sequence[int] | None) -> str:
    """Code that holds on the culprits only: "rank == 2", "rank in (1, 3)"; of all ranks, on the first."""
    chosen = sorted(culprits or [0])
    return f"rank == {chosen[0]}" if len(chosen) == 1 else f"rank in ({', '.join(map(str, chosen))})"


def others(culprits: Sequence[int] | None) -> str:
    """Who waits for the culprits: " while all others wait", or nothing where all ranks are concerned."""
    return "all other ranks wait" if culprits else "no rank waits for another"


def line(where: Any) -> str:
    """A Where, or the first of several, as "train.py:57 in main" without folder; "" where none is known."""
    if isinstance(where, Sequence) and not isinstance(where, str):
        where = where[0] if where else None
    if not isinstance(where, Mapping):
        return ""
    function = where.get("function") or ""
    inside = f" in {function}" if function and function != "<module>" else ""
    return f"{posixpath.basename(where['file'])}:{where['line']}{inside}"


def at(where: Any, operation: str | None = None) -> str:
    """Like :func:`line`, as " at train.py:57 in main" to append to a sentence. Where no line is known, the annotation or operator
    that is, as ' in "# sparse arch"'; "" where neither is."""
    text = line(where)
    if text or not operation:
        return f" at {text}" if text else ""
    return f" in {operation}" if _NAME.fullmatch(operation) else f' in "{operation}"'


def waiting(stop: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> str:
    """Which ranks wait for those that stopped, in which collective and since when, as a sentence before another one; "" where none do."""
    waiting_ranks = stop["waiting_ranks"]
    if not waiting_ranks:
        return ""
    waits = ("has been waiting", "have been waiting") if stop["since"] else ("waits", "wait")
    text = f"{sentence(ranks(waiting_ranks, job))} {verb(waiting_ranks, *waits, job)} "
    if stop["collective"]:
        text += f"in {stop['collective']}"
        text += f" number {stop['sequence']}" if stop["sequence"] is not None else ""
        text += f" of process group {stop['group']}" if stop["group"] else ""
        text += f" ({stop['tensors']})" if stop["tensors"] else ""
    else:
        text += "for other ranks"
    since = f" since {stop['since']}" if stop["since"] else ""
    return f"{text}{at(stop['waits_at'])}{since}. "


def often(cost: Mapping[str, Any]) -> str:
    """How often a cost occurs: "in every step", "every 50 steps", "in steps 100 to 180", "in 2 of 7 recorded steps (...)", ..."""
    first, last, period = cost.get("first_step"), cost.get("last_step"), cost.get("period_steps")
    hit, seen = cost.get("steps_hit"), cost.get("steps_seen")
    persistence = cost.get("persistence")
    if seen == 1:
        return "in the one recorded step"
    if outstanding := cost.get("stands_out_in"):
        return f"in {len(outstanding)} of {seen} recorded steps ({_numbered(outstanding)})"
    if persistence == "periodic" and period:
        return f"every {period} steps"
    if persistence == "range" and first is not None and last is not None:
        return f"in steps {first} to {last}"
    if persistence in ("random", "periodic", "range") and hit and seen:
        return f"in {hit} of {seen} steps"
    return "in every step" if persistence == "always" else "in some steps"


_TOLD_STEPS = 4


def _numbered(steps: Sequence[int]) -> str:
    """[18] -> "step 18", [18, 22] -> "steps 18 and 22"; long lists are cut."""
    shown = [str(step) for step in steps[:_TOLD_STEPS]]
    if len(steps) > _TOLD_STEPS:
        return f"steps {', '.join(shown)} and {len(steps) - _TOLD_STEPS} more"
    return f"step {shown[0]}" if len(shown) == 1 else f"steps {', '.join(shown[:-1])} and {shown[-1]}"


def beside_others(cost: Mapping[str, Any]) -> str:
    """Where other causes make ranks late in the same steps: what mending this one alone, or after the others, saves. "" where none does."""
    whole, alone, remaining = (
        cost.get(name) for name in ("ms_per_step", "alone_ms_per_step", "remaining_ms_per_step")
    )
    if not whole or alone is None or remaining is None or remaining - alone < _DIFFERS * whole:
        return ""
    saves = "nothing" if alone < _NOTHING * whole else f"{ms(alone)} per step"
    return (
        f" Other ranks are late for other reasons, too: fixing only this saves {saves}; once the others are fixed, it saves "
        f"{ms(remaining)} per step."
    )


_ASLEEP_SHARE = 0.1
"""A process that computes for less than this part of its time finds a core among others that are busy."""
_WAITS_SHARE, _BUSY = 0.5, 0.8
"""Workers that wait for most of their time cost little: there may be so many that each need be at work for this part of the time,
and a batch that takes longer than others is no wait yet."""


def workers(
    now: int | None,
    wait_ms: float,
    mean_ms: float,
    after_ms: float,
    cores: float | None,
    computing: float | None = None,
) -> int:
    """Loader workers per rank that keep up with training.

    A batch takes ``wait_ms`` where the training process makes it (``now`` is 0); where ``now`` workers
    together make one per step, it takes one of them ``now`` x ``mean_ms``. Training uses one every
    ``after_ms``. At most 16, and as many as ``cores`` (idle per rank, None if unknown) have room for, each of which computes
    ``computing`` (0 to 1, None if unknown) of its time; but always more than ``now``.
    """
    batch_ms = now * mean_ms if now else wait_ms
    waits = computing is not None and computing < _WAITS_SHARE
    pace_ms = max(after_ms, 0.05 * mean_ms) * (_BUSY if waits else 1.0)
    # At least two, because one worker alone cannot even out batches that take longer than others.
    needed = max(math.ceil(batch_ms / pace_ms), 2)
    asleep = computing is not None and computing < _ASLEEP_SHARE
    most = 16 if cores is None or asleep else min(16, int(cores / (computing or 1.0)))
    return max(min(needed, most), (now or 0) + 1)


def headroom(memory: Mapping[str, Any]) -> str:
    """What is left for a larger batch, as a sentence behind another one; "" where that is unknown."""
    free, share, times = memory["headroom_bytes"], memory["headroom_share"], memory["batch_times"]
    if free is None or share is None:
        return ""
    if times is None:
        return f" {size(free)} of memory a rank, {percent(share)}, was never used."
    left = f" {size(free)} of memory, {percent(share)}, was never used on the fullest rank's device"
    return f"{left}: room for at most {number(int(10 * times) / 10)} times the batch."


def sentence(text: str) -> str:
    """Return ``text`` with a capital first letter, the rest as it is."""
    return text[:1].upper() + text[1:]


_LINE_END = re.compile("\r\n|\r|\n")
_ARTICLE = re.compile(r"\b([Aa])(?= (?:8[\d.]*|1[18](?:\.\d+)?) )")
"""The article before a number that begins with a vowel: "of a 18 ms step" becomes "of an 18 ms step"."""


def _on_one_line(value: Any) -> Any:
    """A name of the job's cannot begin a paragraph, or a sentence, of its own."""
    return plain(value) if isinstance(value, str) else value


@functools.cache
def _environment() -> jinja2.Environment:
    """Sandboxed: rule files may be a team's own. Texts are plain; each report escapes for itself.

    Made when the first text is needed: a healthy job needs none, and Jinja2's import costs as much as many rules.
    """
    import jinja2.sandbox

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined,
        finalize=_on_one_line,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.globals["workers"] = workers

    @jinja2.pass_context
    def ranks_of_job(context: Any, culprits: Sequence[int] | None) -> str:
        return ranks(culprits, context.get("job"))

    @jinja2.pass_context
    def verb_of_job(context: Any, culprits: Sequence[int] | None, one: str, many: str) -> str:
        return verb(culprits, one, many, context.get("job"))

    @jinja2.pass_context
    def waiting_in_job(context: Any, stop: Mapping[str, Any]) -> str:
        return waiting(stop, context.get("job"))

    environment.filters.update(
        ms=ms,
        percent=percent,
        size=size,
        number=number,
        hours=hours,
        count=count,
        ordinal=ordinal,
        ranks=ranks_of_job,
        verb=verb_of_job,
        waiting=waiting_in_job,
        stopped=stopped,
        condition=condition,
        everybody=everybody,
        others=others,
        line=line,
        at=at,
        often=often,
        beside_others=beside_others,
        sentence=sentence,
        headroom=headroom,
    )
    return environment


def check_template(template: str) -> None:
    """Raises jinja2.TemplateError where ``template`` does not parse, ValueError where it uses a filter or a test that there is not."""
    from jinja2 import nodes

    environment = _environment()
    parsed = environment.parse(template)
    # Compiled, Jinja2 would pass over those within a condition, and stop at them while the report is made.
    for kind, known in ((nodes.Filter, environment.filters), (nodes.Test, environment.tests)):
        for used in parsed.find_all(kind):
            if used.name not in known:
                what = kind.__name__.lower()
                raise ValueError(f"there is no {what} {used.name!r}.{did_you_mean(used.name, known)}")


def render(template: str, names: Mapping[str, Any]) -> str:
    """Render prose: paragraphs kept, other white space made single. Raises jinja2.TemplateError."""
    text = _filled(template, names)
    paragraphs = (_ARTICLE.sub(r"\1n", " ".join(part.split())) for part in text.split("\n\n"))
    return "\n\n".join(part for part in paragraphs if part)


def render_snippet(template: str, names: Mapping[str, Any]) -> str:
    """Render code: lines and indentation kept. Raises jinja2.TemplateError."""
    return _filled(template, names).strip("\n")


def _filled(template: str, names: Mapping[str, Any]) -> str:
    if "{" not in template:
        # Nothing to fill in, as in every second text of the pack: Jinja would only make the ends of lines one kind.
        return "\n".join(_LINE_END.split(template))
    return _compiled(template).render(names)


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)
