"""Samples that had to wait for Python's lock: by a thread that does ``WORK_MS`` of pure Python in each step.

Python gives the lock to who waits at the end of the work, at the line behind it, or 5 ms after it began to wait, from within. Who
waited for less than 1 ms does not say so.
"""

from __future__ import annotations

import json
import random

import pytest

from tests.measure.recorded import Job, late_facts, measured, plant, record

SLOW, BEHIND, ELSEWHERE = 18, 57, 99
FAIR_NS, PERIOD_NS, LOOK_NS = 5_000_000, 20_000_000, 700_000


def places():
    lines = ((SLOW, "slow"), (BEHIND, "main"), (ELSEWHERE, "main"))
    return [{"where": line, "file": "train.py", "line": line, "function": name} for line, name in lines]


def works_of(folder, rank, work_ns):
    """(start, end) of the work in the rank's steps: it begins after the batch came."""
    lines = (folder / "ranks" / f"{rank:05d}" / "steps.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if "ev" in step]
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
