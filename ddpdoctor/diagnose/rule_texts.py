"""Jinja2 filters and rendering for rule texts: numbers with units, ranks, source lines, frequency."""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddpdoctor.diagnose.rewording import reworded_for_job
from ddpdoctor.diagnose.worker_count import WAITS_SHARE, workers
from ddpdoctor.errors import did_you_mean
from ddpdoctor.measure.places import function_name, is_own_process, place_in_loop
from ddpdoctor.plain import plain
from ddpdoctor.rundir import ranks_in_words, tensors_in_words

if TYPE_CHECKING:
    import jinja2


def ms(value: float) -> str:
    """0.4214 -> "0.421 ms", 46.31 -> "46.3 ms", 1230 -> "1.23 s", 18000000 -> "5 hours"."""
    if value >= 1e6:
        return hours(value / 3.6e6)
    if value >= 1000:
        return f"{value / 1000:.0f} s" if value >= 1e5 else f"{value / 1000:.3g} s"
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


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
    if value < _SECONDS_BELOW_HOURS:
        return count(max(1.0, round(3600 * value)), "second")
    if value < 1:
        return count(round(60 * value), "minute")
    return count(round(value), "hour") if value < _DAYS_FROM_HOURS else count(round(value / 24), "day")


_SECONDS_BELOW_HOURS, _DAYS_FROM_HOURS = 0.025, 48
"""In hours: below the first value (90 s), seconds are shown; from the second on, days."""
THIS_WORK = "...                # this work"
"""Line of a snippet that represents the finding's work if the text of the calling line is unknown."""
_NAME = re.compile(r"[\w.:<>]+")
"""An operation's name that needs no quotation marks in a sentence."""
_ROUNDS_TO_ZERO_BELOW = 0.005
_MIN_DIFFERENCE = 0.05
_MIN_SAVING_SHARE = 0.01
"""A saving below this share of the cost counts as none."""


def number(value: float) -> str:
    """4.0 -> "4", 4.27 -> "4.3", 0.0004 -> "0"."""
    return (
        f"{value:.0f}"
        if value >= 10 or abs(value) < _ROUNDS_TO_ZERO_BELOW or value == round(value)
        else f"{value:.2g}"
    )


def since(version: str | None, first: str) -> bool:
    """Whether ``version`` is known and at least ``first``, which has two numbers: "2.13.0+cpu" since "2.9" is True."""
    known = re.match(r"(\d+)\.(\d+)", version or "")
    return known is not None and tuple(map(int, known.groups())) >= tuple(map(int, first.split(".")))


def ordinal(value: float) -> str:
    """1.0 -> "1st", 2 -> "2nd", 10 -> "10th", 21 -> "21st"."""
    number = round(value)
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


def count(value: float, noun: str) -> str:
    """Return "1 thread", "16 threads"."""
    return f"{number(value)} {noun}" + ("" if value == 1 else "s")


def ranks(culprits: Sequence[int] | None, job: Mapping[str, Any] | None = None) -> str:
    """[1] -> "rank 1", [1, 3, 5] -> "ranks 1, 3 and 5", [0, 8, 9, 10] -> "ranks 0 and 8 to 10". None -> "all ranks", or "all 5 recorded
    ranks" if not all ranks of the ``job`` were recorded. Long lists are truncated."""
    if not culprits:
        return _all_recorded_ranks(job or {})
    return ranks_in_words(culprits)


def verb(culprits: Sequence[int] | None, one: str, many: str, job: Mapping[str, Any] | None = None) -> str:
    """Return ``one`` or ``many``, whichever agrees with the text of :func:`ranks`."""
    return one if (len(culprits) == 1 if culprits else _is_single_rank(job or {})) else many


def all_ranks(job: Mapping[str, Any], many: str, one: str) -> str:
    """All recorded ranks and a verb: "All ranks wait", "All 5 recorded ranks wait", "The recorded rank waits", or for a job of
    one rank "The training process waits"."""
    return sentence(f"{_all_recorded_ranks(job)} {one if _is_single_rank(job) else many}")


def _all_recorded_ranks(job: Mapping[str, Any]) -> str:
    """Noun phrase for all recorded ranks; their number may be unknown."""
    seen, world = job.get("ranks_seen") or 0, job.get("world_size")
    if world == 1:
        return "the training process"
    if seen == 1:
        return "the recorded rank"
    if world is None or not 0 < seen < world:
        return "all ranks"
    return "both recorded ranks" if seen == 2 else f"all {seen:.0f} recorded ranks"


def _is_single_rank(job: Mapping[str, Any]) -> bool:
    return job.get("world_size") == 1 or job.get("ranks_seen") == 1


def stopped(hang: Mapping[str, Any], colon: str = "") -> str:
    """Predicate for "The job" that stopped: "hangs", "seems to hang" if a rank computes, "failed", "hung for 310 s until it was killed",
    "hung" for flight recorder dumps. With a ``colon``, the ranks' positions can follow: "hung for 310 s; last seen:"."""
    if hang["state"] == "failed":
        return f"failed{colon}"
    if hang["lasts"] is None:
        return f"hung{colon}"
    if hang["lasts"]:
        # A long computation is indistinguishable from a hang.
        computes = (hang["not_reached"] or {}).get("doing") == "loop"
        return f"{'seems to hang' if computes else 'hangs'}{colon}"
    lasted = f" for {ms(hang['since_s'] * 1000)}" if hang["since_s"] else ""
    ended = f" until {hang['until']}" if hang["until"] else ""
    return f"hung{lasted}{ended}{colon and '; last seen'}{colon}"


def condition(culprits: Sequence[int] | None) -> str:
    """Python condition for these ranks: "rank == 2", "rank in (1, 3)"; without ranks, for rank 0."""
    chosen = sorted(culprits or [0])
    return f"rank == {chosen[0]}" if len(chosen) == 1 else f"rank in ({', '.join(map(str, chosen))})"


def others(culprits: Sequence[int] | None) -> str:
    """Clause on the other ranks: "all other ranks wait", or "no rank waits for another" if all ranks are affected."""
    return "all other ranks wait" if culprits else "no rank waits for another"


def line(where: Any) -> str:
    """A Where as "train.py:57 in main" without the folder; of several, the first one run by the rank itself; "" if there is none."""
    where = _first_own_line(where)
    if not isinstance(where, Mapping):
        return ""
    function = function_name(where.get("function") or "")
    inside = f" in {function}" if function and function != "<module>" else ""
    return f"{file_and_line(where)}{inside}"


def _lines_of_ranks(where: Any) -> list[Mapping[str, Any]]:
    """Those of several lines that are each of one rank."""
    lines = where if isinstance(where, Sequence) and not isinstance(where, str) else []
    return [each for each in lines if is_own_process(each.get("process"))]


def _preposition(where: Any) -> str:
    where = _first_own_line(where)
    return "just before" if isinstance(where, Mapping) and where.get("follows") else "at"


def _first_own_line(where: Any) -> Any:
    """Of several lines, the first one run by the rank itself, not by a worker of its loader, or else the first one."""
    if not isinstance(where, Sequence) or isinstance(where, str):
        return where
    return next((each for each in where if not each.get("process")), where[0] if where else None)


def file_and_line(where: Mapping[str, Any]) -> str:
    """A line as "train.py:57"."""
    return f"{posixpath.basename(where['file'])}:{where['line']}"


def call(where: Any) -> Any:
    """The line to edit to do the work at ``where`` less often: the outermost of its recorded callers in the training loop, or else the line
    itself; None without a line. Of several lines, the first one run by the rank itself is used."""
    where = _first_own_line(where)
    if not isinstance(where, Mapping):
        return None
    callers = where.get("callers", ())
    stack = [where, *callers[: len(callers) - (where.get("step_callers") or 0)]]
    return stack[place_in_loop([line["file"] for line in stack])]


def function(where: Any) -> str:
    """The function of a Where, or of the first of several."""
    return function_name(_first_own_line(where)["function"])


def in_forward(where: Any) -> bool:
    """Whether a Where, or the first of several, is in a function named forward or called from one: its work is part of a model."""
    where = _first_own_line(where)
    stack = [where, *where.get("callers", ())] if isinstance(where, Mapping) else []
    return any(each["function"].rpartition(".")[2] == "forward" for each in stack)


def at(where: Any, operation: str | None = None) -> str:
    """Like :func:`line` but with " at", to append to a sentence: " at train.py:57 in main", or " just before train.py:57 in main" if the
    samples show the line that ran next. Without a line, the annotation or operator: ' in the annotation "# sparse arch"'; "" without
    either."""
    text = line(where)
    of_ranks = _lines_of_ranks(where)
    if len(of_ranks) > 1:
        *first, last = (f"{line(each)} on {each['process']}" for each in of_ranks)
        return f" at {', '.join(first)} and {last}"
    if text or not operation:
        return f" {_preposition(where)} {text}" if text else ""
    return f" in {operation}" if _NAME.fullmatch(operation) else f' in the annotation "{operation}"'


def waiting(stop: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> str:
    """Sentence on the ranks that wait for the stopped ones, with the collective and the start of the wait; "" if none wait."""
    waiting_ranks = stop["waiting_ranks"]
    if not waiting_ranks:
        return ""
    waits = ("has been waiting", "have been waiting") if stop["since"] else ("waits", "wait")
    text = f"{sentence(ranks(waiting_ranks, job))} {verb(waiting_ranks, *waits, job)} "
    if stop["collective"]:
        text += f"in {stop['collective']}"
        text += f" with sequence number {stop['sequence']}" if stop["sequence"] is not None else ""
        group = stop["group"] or ""
        is_explained = not group or group.startswith("group ") or group.endswith(")")
        text += f" of {'' if is_explained else 'process group '}{group}" if group else ""
        text += f", of {tensors_in_words(stop['tensors'])}," if stop["tensors"] else ""
    else:
        text += "for other ranks"
    since = f" since {stop['since']}" if stop["since"] else ""
    return f"{text}{at(stop['waits_at'])}{since}".rstrip(",") + ". "


FEW_STEPS = 20
"""So many steps, or fewer, do not show that what is in all of them lasts: see the rates for ranks whose speed drifts, in
``docs/how-it-works.md``."""


def often(cost: Mapping[str, Any]) -> str:
    """Frequency of a cost: "in every step", "every 50 steps", "in every step from 100 to 180", "in 2 of 7 recorded steps (...)", ..."""
    first, last, period = cost.get("first_step"), cost.get("last_step"), cost.get("period_steps")
    hit, seen = cost.get("steps_hit"), cost.get("steps_seen")
    persistence = cost.get("persistence")
    if seen == 1:
        return "in the one recorded step"
    if outstanding := cost.get("stands_out_in"):
        return f"in {len(outstanding)} of {seen} recorded steps ({step_numbers(outstanding)})"
    if persistence == "periodic" and period:
        return f"every {period} steps"
    if persistence == "range" and first is not None and last is not None:
        return f"in every step from {first} to {last}"
    if persistence in ("random", "periodic", "range") and hit and seen:
        return f"in {hit} of {seen} steps"
    return (in_few(cost).strip() or "in every step") if persistence == "always" else "in some steps"


def in_few(cost: Mapping[str, Any]) -> str:
    """ " in all 7 steps examined", or " in 6 of 7 steps examined", of a cost in nearly all of few steps, which may not last; else ""."""
    hit, seen = cost.get("steps_hit") or 0, cost.get("steps_seen") or 0
    if cost.get("persistence") != "always" or not hit or not 1 < seen <= FEW_STEPS:
        return ""
    all_seen = "both" if seen == 2 else f"all {seen}"
    return f" in {all_seen if hit == seen else f'{hit} of {seen}'} steps examined"


def each_ms(cost: Mapping[str, Any]) -> float | None:
    """What a cause costs in a step in which it occurs, ms; with the frequency that :func:`often` gives, this is its cost per step. If no
    frequency is known, the median of its lateness."""
    per_step, hit, seen = cost["ms_per_step"], cost.get("steps_hit"), cost.get("steps_seen")
    if cost.get("persistence") == "periodic" and cost.get("period_steps"):
        return float(per_step * cost["period_steps"])
    if (
        cost.get("persistence") in ("random", "periodic", "range")
        and hit
        and seen
        and not cost.get("stands_out_in")
    ):
        return float(per_step * seen / hit)
    found = cost.get("occurrence_ms")
    return None if found is None else float(found)


def evened_ms(cost: Mapping[str, Any], before_ms: float, job: Mapping[str, Any]) -> float | None:
    """Step time with the same total work in even shards, ms: the others then have a part of what these ranks have too much; None if it is
    unknown, or not shorter."""
    ranks_of_cost, world_size = cost["ranks"] or [], job["world_size"] or 0
    if not 0 < len(ranks_of_cost) < world_size or ms(before_ms / cost["speedup"]) == ms(before_ms):
        return None
    return float(before_ms - cost["ms_per_step"] * (1 - len(ranks_of_cost) / world_size))


_MAX_STEPS = 4


def step_numbers(steps: Sequence[int]) -> str:
    """[18] -> "step 18", [18, 22] -> "steps 18 and 22"; long lists are truncated."""
    shown = [str(step) for step in steps[:_MAX_STEPS]]
    if len(steps) > _MAX_STEPS:
        return f"steps {', '.join(shown)} and {len(steps) - _MAX_STEPS} more"
    return f"step {shown[0]}" if len(shown) == 1 else f"steps {', '.join(shown[:-1])} and {shown[-1]}"


def beside_others(cost: Mapping[str, Any]) -> str:
    """Sentence on the saving if this cause is fixed first or last, if other causes make ranks late in the same steps; else ""."""
    whole, alone, remaining = (
        cost.get(name) for name in ("ms_per_step", "alone_ms_per_step", "remaining_ms_per_step")
    )
    if not whole or alone is None or remaining is None or remaining - alone < _MIN_DIFFERENCE * whole:
        return ""
    saves = "nothing" if alone < _MIN_SAVING_SHARE * whole else f"{ms(alone)} per step"
    return (
        f" Other ranks are late for other reasons, too: fixed alone, this saves {saves}; fixed after them, {ms(remaining)} per step. The "
        "cost above is its part of the total."
    )


_STARVED_SHARE = 0.2
"""Workers have too few cores if they wait for a CPU during at least this share of batch preparation."""


def slow_workers(where: Sequence[Mapping[str, Any]], after: str = "") -> str:
    """Clause on the first of the lines that was run by a loader's workers, prefixed with ``after``: "workers of rank 1 are slow at
    data.py:86 in collate"; "" if there is none."""
    found = next((each for each in where if each.get("process")), None)
    if found is None:
        return ""
    return f"{after}{found['process']} {'is' if found['process'].startswith('worker ') else 'are'} slow{at(found)}"


def run_by_all(where: Sequence[Mapping[str, Any]], least: float) -> bool:
    """Whether the other ranks spend at least the share ``least`` of these ranks' time at the first of the lines."""
    share = where[0].get("others_share") if where else None
    return share is not None and share >= least


def off_cpu(cost: Mapping[str, Any], most: float) -> bool:
    """Whether the training threads are running or runnable for less than the share ``most`` of the extra time; False if it is unknown."""
    awake_ms, late_ms = cost["awake_ms"], cost["late_ms"]
    return awake_ms is not None and bool(late_ms) and awake_ms < most * late_ms


def programs(used: Sequence[Mapping[str, Any]]) -> str:
    """Sentence on the programs, other than the ranks and their workers, that used the most CPU; "" if there is none."""
    starters = ["" if each["rank"] is None else f", started by rank {each['rank']:.0f}" for each in used]
    listed = ", ".join(
        f"`{each['name']}` ({count(each['cores'], 'core')}{starter})"
        for each, starter in zip(used, starters, strict=True)
    )
    return f"Programs other than the ranks and their workers used cores: {listed}." if listed else ""


def preparation(loader: Mapping[str, Any]) -> str:
    """Sentences on batch preparation by the workers of a loader, to append to others; "" if it was not recorded."""
    rank, lines, slow = loader["workers_rank"], loader["worker_where"], loader["slow_worker"]
    batch, own, others = (loader[name] for name in ("batch_ms", "slow_worker_ms", "other_workers_ms"))
    if rank is None or batch is None:
        return ""
    whole = "" if loader["batch_bytes"] is None else f" of {size(loader['batch_bytes'])}"
    share = lines[0]["share"] if lines else None
    place = "" if share is None else f", {percent(share)} of {{}} at {line(lines)}"
    if share is not None and lines[0].get("inside"):
        place += f", mostly in {line(lines[0]['inside'])}"
    if None in (slow, own, others):
        text = f" On rank {rank}, a worker needs {ms(batch)} for a batch{whole}{place.format('it')}."
    else:
        times = f"{ms(own)} for a batch{whole}, the other workers {ms(others)}"
        text = f" Worker {slow} of rank {rank} needs {times}{place.format('the difference')}."
    awake, starved = loader["computing_share"], loader["workers_starved_share"]
    if awake is not None and awake < WAITS_SHARE:
        waits = "workers do not compute but wait, for example for files or a service"
        text += f" For {percent(1 - awake)} of the preparation, {waits}."
    if starved is not None and starved >= _STARVED_SHARE:
        shared = "workers have no CPU: ranks and workers share too few cores"
        text += f" For {percent(starved)} of the preparation, {shared}."
    return text


_MAX_BATCH_MULTIPLE = 10.0
"""From this multiple of the batch, the free memory is not expressed in batches: other limits apply first."""


def headroom(memory: Mapping[str, Any]) -> str:
    """Sentence on the memory available for a larger batch, to append to another one; "" if unknown."""
    free, share, times = memory["headroom_bytes"], memory["headroom_share"], memory["batch_times"]
    if free is None or share is None:
        return ""
    if times is None:
        return f" {size(free)} of memory a rank, {percent(share)}, was never used."
    left = f" {size(free)} of memory, {percent(share)}, was never used on the fullest rank's device"
    if times >= _MAX_BATCH_MULTIPLE:
        return f"{left}: memory does not limit the batch."
    return f"{left}: room for at most {number(int(10 * times) / 10)} times the batch."


def sentence(text: str) -> str:
    """Return ``text`` with a capital first letter."""
    return text[:1].upper() + text[1:]


def inside_sentence(text: str) -> str:
    """``text`` with a small first letter, to follow a colon, unless it begins with an acronym or a name in capitals."""
    return text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text


_LINE_END = re.compile("\r\n|\r|\n")
_ARTICLE = re.compile(r"\b([Aa])(?= (?:8[\d.]*|1[18](?:\.\d+)?) )")
"""Article before a number that begins with a vowel: "of a 18 ms step" becomes "of an 18 ms step"."""


def _on_one_line(value: Any) -> Any:
    """Puts texts from the job on one line, so that they cannot add paragraphs."""
    return plain(value) if isinstance(value, str) else value


@functools.cache
def _environment() -> jinja2.Environment:
    """The sandboxed environment (rule files may be untrusted). Output is plain text; each report escapes it.

    Created at first use: a healthy job renders no text, and importing Jinja2 takes as long as evaluating many rules.
    """
    import jinja2.sandbox

    from ddpdoctor.diagnose.template_cache import TemplateCache

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined,
        finalize=_on_one_line,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        bytecode_cache=TemplateCache(),
    )
    environment.globals["workers"] = workers

    def in_job(function: Callable[..., str]) -> Callable[..., str]:
        """``function`` with the job, its last argument, taken from the context."""
        return jinja2.pass_context(lambda context, *given: function(*given, context.get("job")))

    filters = (
        *(ms, percent, size, number, hours, count, ordinal, since, sentence),
        *(line, call, function, at, in_forward, often, in_few, each_ms, evened_ms, beside_others),
        *(stopped, condition, all_ranks, others, headroom, preparation, programs, slow_workers),
        *(run_by_all, off_cpu),
    )
    environment.filters |= {function.__name__: function for function in filters}
    environment.filters |= {function.__name__: in_job(function) for function in (ranks, verb, waiting)}
    environment.filters["steps"] = step_numbers
    return environment


def check_template(template: str) -> None:
    """Raises jinja2.TemplateError if ``template`` does not parse, ValueError if it uses an unknown filter or test."""
    from jinja2 import nodes

    environment = _environment()
    parsed = environment.parse(template)
    # Jinja2's compiler ignores unknown names inside a condition, which would then fail during rendering.
    for kind, known in ((nodes.Filter, environment.filters), (nodes.Test, environment.tests)):
        for used in parsed.find_all(kind):
            if used.name not in known:
                what = kind.__name__.lower()
                raise ValueError(f"there is no {what} {used.name!r}.{did_you_mean(used.name, known)}")


def render(template: str, names: Mapping[str, Any]) -> str:
    """Render prose: keeps paragraphs, collapses other white space. Raises jinja2.TemplateError."""
    text = reworded_for_job(_fill(template, names), names)
    paragraphs = (_ARTICLE.sub(r"\1n", " ".join(part.split())) for part in text.split("\n\n"))
    return "\n\n".join(part for part in paragraphs if part)


def render_snippet(template: str, names: Mapping[str, Any]) -> str:
    """Render code: keeps lines and indentation. Raises jinja2.TemplateError."""
    return _fill(template, names).strip("\n")


def _fill(template: str, names: Mapping[str, Any]) -> str:
    if "{" not in template:
        # Plain text, like half of the pack's texts: Jinja2 would only normalise line ends.
        return "\n".join(_LINE_END.split(template))
    return _compile(template).render(names)


@functools.cache
def _compile(template: str) -> jinja2.Template:
    from ddpdoctor.diagnose.template_cache import compiled

    return compiled(_environment(), template)
