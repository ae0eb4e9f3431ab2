"""Renders the exam's results as a page: the cases, a table for each half, and the seeds of the misses."""

from __future__ import annotations

from collections.abc import Sequence

from .real.kinds import TRAPS
from .score import ASKED, Mark, asked_in, totals

HALVES = {
    "real": "Jobs on CPU ranks, recorded by `ddpdoctor run`",
    "when": "Jobs on CPU ranks with work at drawn times of the run",
    "restarts": "Jobs on CPU ranks that torchrun restarts",
    "named": "Each kind of fault and each trap, asked by name",
    "generated": "Traces of simulated GPU jobs",
    "short": "Traces of two to four steps of simulated GPU jobs",
}
HEAD = """\
<!-- Written by `python -m tests.exam --write`; edit tests/exam/page.py instead. -->

# How often it is right

`python -m tests.exam` generates jobs with random faults that no test of the analysis contains, and compares the diagnosis with what
was planted. It was written from the rules' pages alone, by an engineer who had not read how the diagnosis is made.

**Real jobs** are programs with different structures (a script, a trainer class, callbacks, nested epochs, a generator), models,
loaders and optimizers. They run on two CPU ranks, or four if there are enough cores. **Simulated jobs** come from a simulator of
hosts, devices and links that shares no code with the analysis. Topology, clocks, noise, windows, lost events, and what the profiler
recorded are random. A fault takes 8 to 45 % of the step on a random rank at a known line. A fifth of the jobs are healthy, a fifth
have two faults. Of **short windows** (`--short`), two to four steps of such jobs, half are healthy and none has two faults; that a rank
arrives late without a cause ([unexplained lateness](rules/rank-imbalance/unexplained-lateness.md)) is right for a fault of that rank.

**Jobs with work at drawn times** (`--when`) are such programs with steps of about 20 ms. The fault is in every step, in every n-th one,
from a step on, until a step, grows, or is a pause of one or two steps. The job notes in which steps it does that work, and for how long.

**Jobs that are restarted** (`--restarts`) have up to three attempts that fail, each in a drawn way, step and rank, and a drawn interval of
checkpoints. The job notes its steps and failures, and who runs it when its processes end.

**Ground truth.** The cost of a fault is what its removal saves: the same program or simulation runs with all faults, without each,
and without any. Variants of real programs alternate, and the median difference counts. They are repeated until its 90 % interval is
no wider than a tenth of the step, for 20 s at most; if it is wider then, the price is not marked.

**Seeds.** Each seed is used once. The results below come from seeds that were not used before the analysis reached its present
state. Real jobs are recorded first, and diagnosed later.

**Marks.** Each cell says how often the diagnosis was right, out of how often that was asked.

| mark | asked if | right if |
| --- | --- | --- |
| rule | a fault costs 4 % of the step or more | a rule whose page describes the fault reports it; above 7 % as a warning or critical |
| rank | the rule is right | it names the ranks with the fault, and no others |
| line | stacks were recorded and a line carries the fault | `where` begins with that line |
| price | a rank is right, and the ground truth is that sure, and to a quarter of itself | it is within a third of the saving |
| range | the finding has one | the saving lies in it; that of a real job has an error, whose interval is added (squares) |
| silence | always | there is no other warning or critical finding, except effects and statements that are true anyway |

Of jobs with work at drawn times:

| mark | asked if | right if |
| --- | --- | --- |
| rule | there is a fault | a finding of the family `run` has its kind of work, or an unknown one; or another describes it or has its line |
| rank, line | the rule is right, and the rank | as above |
| when | there is a fault | such a finding says its first and last step to 2 % of the run; or n exactly, and those to n steps |
| seconds | that is right | they are within a fifth of those that the job has noted |
| rate | the fault is in some steps only | no finding at its line says *in every step* |
| silence | always | no finding of the family `run` says anything else |
| account | always | the parts of the run add up to the launcher's time within 1 % |

Two faults can hide each other: ranks wait for the latest, so removing either saves nothing and removing both saves a lot. One of
them must be named; naming either is no false positive. A price is right if it lies between what a fault costs beside the other and
what it costs alone, or if both prices add up to what both cost. In a simulated job without a fault,
[allreduce/communication-bound](rules/allreduce/communication-bound.md) is no false positive if 5 % of the step or more is transfer
that already starts as early as it can. The same applies to [sync/device-sync](rules/sync/device-sync.md) in a job that reads its
loss in every step.
"""


def page(marks: Sequence[Mark], remark: str = "") -> str:
    """The page of ``marks``. ``remark``: a further sentence on how they were obtained."""
    parts = [HEAD, *([f"**{remark}**\n"] if remark else [])]
    for half, title in HALVES.items():
        marks_of_half = sorted((each for each in marks if each.half == half), key=lambda each: each.seed)
        if marks_of_half:
            parts += [
                f"## {title}\n",
                _summary(marks_of_half),
                _table(marks_of_half),
                "### Misses\n",
                _misses(marks_of_half),
            ]
    return "\n".join(parts)


def _summary(marks: Sequence[Mark]) -> str:
    seeds = [each.seed for each in marks]
    healthy = [each for each in marks if not each.kinds or each.kinds[0] in TRAPS]
    false_positives = sum(each.right["silence"] < each.asked["silence"] for each in healthy)
    return (
        f"{len(marks)} cases from seeds {min(seeds)} to {max(seeds)}, {len(healthy)} of them healthy; "
        f"{false_positives or 'none'} of the healthy ones got a false positive. {unmarked_sentence(marks)}\n"
    )


def unmarked_sentence(marks: Sequence[Mark]) -> str:
    """A sentence with the number of faults whose price is not marked."""
    unsure = sum(doubt.startswith("noisy: ") for each in marks for doubt in each.doubts)
    faults = sum(kind not in TRAPS for each in marks for kind in each.kinds)
    return f"{unsure} of {faults} faults have no ground truth sure enough to mark a price."


def _table(marks: Sequence[Mark]) -> str:
    rows = totals(marks)
    columns = asked_in(rows)
    whole = rows.pop("all")
    shares = [f"{right}/{asked} ({_percent(right, asked)})" for right, asked in map(whole.get, columns)]
    lines = [f"| fault | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    for kind, row in rows.items():
        cells = [f"{right}/{asked}" if asked else "" for right, asked in map(row.get, columns)]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    lines.append(f"| **all** | {' | '.join(shares)} |")
    return "\n".join(lines) + "\n"


def _percent(right: int, asked: int) -> str:
    """A percentage, rounded down so that 100 % means no miss."""
    return f"{100 * right // asked} %"


def _misses(marks: Sequence[Mark]) -> str:
    """A table of the seeds of the misses, by mark."""
    rows = {
        what: sorted({each.seed for each in marks for miss in each.misses if miss.startswith(f"{what}:")})
        for what in ASKED
    }
    lines = [f"| {what} | {', '.join(map(str, seeds))} |" for what, seeds in rows.items() if seeds]
    return "\n".join(["| missed | seeds |", "| --- | --- |", *lines] if lines else ["None."]) + "\n"
