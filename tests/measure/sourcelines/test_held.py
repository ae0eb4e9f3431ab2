"""Samples that had to wait for Python's lock: by a thread that does ``WORK_MS`` of pure Python in each step.

Python gives the lock to who waits at the end of the work, at the line behind it, or 5 ms after it began to wait, from within. Who
waited for less than 1 ms does not say so.
"""

from __future__ import annotations

import json
import random

import pytest

from ddpdoctor.measure.flames import flame_graphs
from ddpdoctor.measure.steplog import read_logs
from ddpdoctor.rundir.reader import RunDirectory
from tests.measure.recorded import Job, late_facts, measured, plant, record
from tests.measure.steplogs import steps_of

SLOW, CALL, BEHIND, ELSEWHERE = 18, 55, 57, 99
FAIR_NS, PERIOD_NS, LOOK_NS = 5_000_000, 20_000_000, 700_000


def places():
    """The slow function is called a few lines above the line behind the work."""
    lines = ((CALL, "main", {}), (SLOW, "slow", {"by": CALL}), (BEHIND, "main", {}), (ELSEWHERE, "main", {}))
    return [
        {"where": line, "file": "train.py", "line": line, "function": name, **above}
        for line, name, above in lines
    ]


def works_of(folder, rank, work_ns):
    """(start, end) of the work in the rank's steps: it begins after the batch came."""
    steps = [step for step in steps_of(folder, rank) if "ev" in step]
    begins = [step["t"][0] + next(e["s"] + e["d"] for e in step["ev"] if e["k"] == "data") for step in steps]
    return [(begin, begin + work_ns) for begin in begins], steps[0]["t"][0], steps[-1]["t"][1]


def got(works, wanted):
    """(when, line, ns waited) of who wants the lock at this moment."""
    inside = next(((begin, end) for begin, end in works if begin <= wanted < end), None)
    if inside is None:
        return wanted, ELSEWHERE, 0
    end = inside[1]
    given, line = (wanted + FAIR_NS, SLOW) if wanted + FAIR_NS < end else (end + 1_000, BEHIND)
    return given, line, given - wanted if given - wanted >= 1_000_000 else 0


def write_samples(folder, rank, work_ns, closer):
    works, first, last = works_of(folder, rank, work_ns)
    drawn = random.Random(rank)
    taken, looks, moment = [], [], first
    while moment < last:
        moment, line, held_ns = got(works, moment + int(PERIOD_NS * (0.5 + drawn.random())))
        taken.append((moment, line, held_ns))
    for begin, _ in works[::4] if closer else ():
        moment, until = begin - drawn.randrange(LOOK_NS), begin + work_ns
        while moment < until:
            moment, line, held_ns = got(works, moment + LOOK_NS)
            looks += [(moment, line, held_ns)] * bool(held_ns)

    def line_of(rows, key, **more):
        listed = [[at - first, line, line] for at, line, _ in rows]
        return {"t": first, key: listed, "h": [held_ns for *_, held_ns in rows], **more}

    lines = [*places(), line_of(taken, "s")]
    if closer:
        lines.append(line_of(looks, "c", n=(last - first) // 4))
    (folder / "ranks" / f"{rank:05d}" / "samples.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )


def named(tmp_path, work_ms, closer):
    folder = record(tmp_path / "run", Job(steps=120, extra=plant(1, host=work_ms)))
    for rank in range(4):
        write_samples(folder, rank, int(work_ms * 1e6) if rank == 1 else 0, closer)
    found, _ = measured(folder)
    return [where.line for where in late_facts(found)["host"].where]


def test_work_beyond_5_ms_is_seen_from_within_by_looks_in_close_succession(tmp_path):
    assert named(tmp_path, 7.0, closer=True)[0] == SLOW


@pytest.mark.parametrize("closer", [False, True])
def test_long_work_needs_no_close_look(tmp_path, closer):
    assert named(tmp_path, 15.0, closer)[0] == SLOW


@pytest.mark.parametrize("closer", [False, True])
def test_of_work_that_is_never_seen_from_within_the_line_behind_it_is_told(tmp_path, closer):
    assert named(tmp_path, 4.0, closer) == [BEHIND]


def test_what_held_the_lock_while_the_job_was_prepared_is_not_what_holds_it_in_a_step(tmp_path):
    """Imports hold it for long, and lie above the training loop in the script."""

    def samples(rank, works):
        before = [(works[0][0] - 1_000_000_000 + n, CALL, CALL, 8_000_000) for n in range(20)]
        rows = [(begin + 100, ELSEWHERE, ELSEWHERE, 0) for begin, _ in works]
        behind = [(end, BEHIND, BEHIND, 2_000_000) for _, end in works[5::10]] if rank == 1 else []
        return sorted([*before, *rows, *behind])

    assert lines_told(tmp_path, samples) == [BEHIND]


def of_places(folder, rank, rows):
    """A rank's samples, as (moment, line, innermost line, ns waited); ``places`` by number."""
    first = rows[0][0]
    lines = [
        *places(),
        {
            "where": 2,
            "file": "/venv/lib/python3.11/site-packages/torch/_ops.py",
            "line": 1279,
            "function": "op",
        },
        {
            "t": first,
            "s": [[at - first, line, innermost] for at, line, innermost, _ in rows],
            "h": [held_ns for *_, held_ns in rows],
        },
    ]
    (folder / "ranks" / f"{rank:05d}" / "samples.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )


def lines_told(tmp_path, samples_of, work_ms=4.0):
    """Of rank 1, which works longer, where ``samples_of(rank, works)`` gives each rank's samples."""
    folder = record(tmp_path / "run", Job(steps=120, extra=plant(1, host=work_ms)))
    for rank in range(4):
        works = works_of(folder, rank, int(work_ms * 1e6))[0]
        of_places(folder, rank, samples_of(rank, works))
    found, _ = measured(folder)
    return [where.line for where in late_facts(found)["host"].where]


@pytest.mark.parametrize("holder", [1, 3])
def test_what_lets_go_of_the_lock_is_not_what_kept_it(tmp_path, holder):
    """One rank was asked for the lock in the work once; all other samples of it show the call behind it."""

    def samples(rank, works):
        others = [(begin + 100, ELSEWHERE, ELSEWHERE, 0) for begin, _ in works]
        if rank == holder:
            others[3] = (works[3][1], SLOW, SLOW, 5_200_000)
        behind = [(end, BEHIND, 2, 2_000_000) for _, end in works[5::10]] if rank == 1 else []
        return sorted([*others, *behind])

    assert lines_told(tmp_path, samples) == [SLOW]


def test_a_call_that_mostly_lets_go_kept_nothing_when_somebody_waited_long_there(tmp_path):
    def samples(rank, works):
        rows = [(begin + 100, ELSEWHERE, ELSEWHERE, 0) for begin, _ in works]
        if rank == 1:
            rows += [(end, BEHIND, 2, 2_000_000) for _, end in works[5::10]]
            rows += [(end, BEHIND, 2, 8_700_000) for _, end in works[8::40]]
            rows += [(end - 1000, SLOW, SLOW, 5_200_000) for _, end in works[9::40]]
        return sorted(rows)

    assert lines_told(tmp_path, samples) == [SLOW]


@pytest.mark.parametrize(
    ("counts", "told"), [({SLOW: 3}, [SLOW]), ({SLOW: 3, BEHIND: 1}, [SLOW]), ({SLOW: 2, BEHIND: 2}, [])]
)
def test_few_samples_tell_the_line_if_no_other_is_likely(tmp_path, counts, told):
    def samples(rank, works):
        rows = [(begin + 100, ELSEWHERE, ELSEWHERE, 0) for begin, _ in works]
        lines = [line for line, count in counts.items() for _ in range(count)] if rank == 1 else []
        return sorted(
            [*rows, *((end - 1000, line, line, 0) for (_, end), line in zip(works[7:], lines, strict=False))]
        )

    assert lines_told(tmp_path, samples) == told


def test_the_flame_graph_shows_the_line_that_the_finding_names(tmp_path):
    """Rank 1 keeps the lock for 15 ms of a step; who wants it in the last 5 ms of them gets it at the line behind."""
    folder = record(tmp_path / "run", Job(steps=120, extra=plant(1, host=15.0)))
    for rank in range(4):
        write_samples(folder, rank, 15_000_000 if rank == 1 else 0, closer=False)
    found, _ = measured(folder)
    assert late_facts(found)["host"].where[0].line == SLOW
    flame = next(flame for flame in found.drawn.flames if flame.rank == 1)
    shown = {flame.places[frame.place].line: frame.ms for frame in flame.frames}
    assert shown[SLOW] == pytest.approx(15.0, rel=0.1)
    assert shown[BEHIND] < 2.0, "who waited for less than 1 ms"
    (logs,) = read_logs([RunDirectory.open(str(folder))])
    document = dict(flame_graphs(logs.logs, {}, range(120)))[1]
    lines = [frame["line"] for frame in document["shared"]["frames"]]
    (profile,) = document["profiles"]
    stacks = zip(profile["samples"], profile["weights"], strict=True)
    assert sum(ms for stack, ms in stacks if lines[stack[-1]] == SLOW) == pytest.approx(15.0, rel=0.1)


def test_code_outside_of_the_forward_pass_holds_no_lock_in_it(tmp_path):
    """A line of the loop holds it for long in each step, and a call in the forward pass comes after something that held it. That line
    is no candidate."""
    folder = record(tmp_path / "run", Job(steps=120, extra=plant(1, forward=4.0)))
    for rank in range(4):
        steps = [step for step in steps_of(folder, rank) if "ev" in step]
        spans = [
            (step["t"][0] + event["s"], step["t"][0] + event["s"] + event["d"])
            for step in steps
            for event in step["ev"]
            if event["k"] == "fwd"
        ]
        rows = [(begin - 100, SLOW, SLOW, 6_000_000) for begin, _ in spans]
        behind = [(end - 100, BEHIND, 2, 2_000_000) for _, end in spans[5::10]] if rank == 1 else []
        of_places(folder, rank, sorted([*rows, *behind]))
    found, _ = measured(folder)
    (where, *_) = late_facts(found)["compute"].where
    assert (where.line, where.follows) == (BEHIND, True)
