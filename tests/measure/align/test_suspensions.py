"""Ranks that were stopped from outside: set aside and told. A stall of the job's own stays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pytest

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.measure.align import exclude_suspended
from ddpdoctor.measure.steplog import SUSPENDED, Event, RankLog, Step
from ddpdoctor.measure.telemetry import HostTelemetry
from ddpdoctor.rundir.reader import RankRecord
from tests.measure.clocks import copied, suspend
from tests.measure.grids import pairs_first
from tests.measure.recorded import Job, late_facts, measured, plant, record
from tests.measure.steplogs import lines_of, write_lines

FIXTURES = Path(__file__).parents[3] / "fixtures"
S = 1_000_000_000
STEP = 60


def diagnosed(folder: Path):
    return analyze(str(folder), Options(cache=False, jobs=1))


def told(notes) -> list[str]:
    return [note for note in notes if "suspended" in note]


@pytest.fixture(scope="module")
def expected():
    return {name: diagnosed(FIXTURES / name) for name in ("slow-data-one-rank", "healthy")}


def without_telemetry(folder: Path) -> None:
    for file in folder.glob("hosts/*/telemetry.jsonl"):
        file.unlink()


@pytest.mark.parametrize(
    ("name", "ns", "ranks"),
    pairs_first(("slow-data-one-rank", "healthy"), (4 * S, 3480 * S), (None, (0,), (1,))),
)
def test_a_pause_changes_no_verdict(tmp_path, expected, name, ns, ranks):
    folder = copied(FIXTURES / name, tmp_path / "run")
    suspend(folder, STEP, ns, ranks)
    found, wanted = diagnosed(folder), expected[name]
    (note,) = told(found.notes)
    length = "4 s" if ns == 4 * S else "58 min"
    assert f"suspended for {length} in step {STEP}" in note
    assert note.startswith("The job was" if ranks is None else f"Rank {ranks[0]} was")
    assert found.steps.set_aside["suspended"] == 2
    assert found.steps.measured + sum(found.steps.set_aside.values()) == found.steps.count
    assert (found.healthy, found.verdict.rule) == (wanted.healthy, wanted.verdict.rule)
    assert found.steps.mean_ms == pytest.approx(wanted.steps.mean_ms, rel=0.02)
    assert [(f.rule, f.ranks) for f in found.findings] == [(f.rule, f.ranks) for f in wanted.findings]


def test_a_pause_without_samples_shows_in_telemetry(tmp_path, expected):
    folder = copied(FIXTURES / "slow-data-one-rank", tmp_path / "run")
    suspend(folder, STEP, 3480 * S)
    for file in folder.glob("ranks/*/samples.jsonl"):
        file.unlink()
    found = diagnosed(folder)
    assert told(found.notes)[0].startswith("The job was suspended for 58 min")
    assert found.steps.mean_ms == pytest.approx(expected["slow-data-one-rank"].steps.mean_ms, rel=0.02)


def test_one_step_far_beyond_all_others_where_nothing_was_sampled(tmp_path):
    job = Job(steps=100, extra=plant(2, data=6.0))
    folder = record(tmp_path / "run", job)
    suspend(folder, STEP, 3600 * S)
    found, notes = measured(folder)
    (note,) = told(notes)
    assert "suspended, or stuck, for 60 min" in note
    assert late_facts(found)["data"].ms_per_step == pytest.approx(6.0, abs=0.1)
    assert found.facts.steps.mean_ms == pytest.approx(25.5, abs=0.1)


def stalled(folder: Path, steps, ns: int, kind: str, cpu_ns: int | None, sampled: bool) -> None:
    """The job's own: both ranks stand in a call of this kind."""
    for step in steps:
        suspend(folder, step, ns, None if not sampled else ())
        for place in folder.glob("ranks/*/steps.jsonl"):
            lines = lines_of(place)
            line = next(line for line in lines if line.get("step") == step)
            backward = [event for event in line["ev"] if event["k"] == "bwd"][-1]
            backward["d"] -= ns
            for event in line["ev"]:
                event["s"] += ns if event["s"] >= backward["s"] else 0
            backward["base"] += ns
            line["ev"].append({"k": kind, "s": backward["s"] - ns - 10_000, "d": ns, "w": 1})
            if backward.get("ready") and backward["ready"][-1] >= ns:
                backward["ready"][-1] -= ns
            line["cpu"] = cpu_ns
            write_lines(place, lines)
    without_telemetry(folder)


@pytest.mark.parametrize(
    ("kind", "cpu_ns", "sampled"), [("save", None, True), ("save", 5 * S, False), ("fwd", 5 * S, False)]
)
def test_a_stall_in_which_threads_run_or_compute_is_the_job_s_own(tmp_path, kind, cpu_ns, sampled):
    folder = copied(FIXTURES / "healthy", tmp_path / "run")
    stalled(folder, (40, 60, 80), 5 * S, kind, cpu_ns, sampled)
    found = diagnosed(folder)
    assert not told(found.notes) and "suspended" not in found.steps.set_aside
    assert found.steps.mean_ms > 100 and not found.healthy


def test_a_single_stall_of_the_job_s_own_is_not_called_healthy(tmp_path):
    """Both ranks stand in their forward for ten minutes, and are sampled all the while."""
    folder = copied(FIXTURES / "healthy", tmp_path / "run")
    stalled(folder, (60,), 600 * S, "fwd", None, sampled=True)
    found = diagnosed(folder)
    assert not told(found.notes) and not found.healthy and found.verdict.rule == "run/pause"
    assert "for 10 minutes in step 60" in found.verdict.headline.replace("600 s", "10 minutes")


def test_what_silences_the_process_again_and_again_is_the_job_s_own(tmp_path):
    """Native code that reads a file and holds the interpreter's lock meanwhile."""
    folder = copied(FIXTURES / "healthy", tmp_path / "run")
    stalled(folder, (30, 50, 70, 90), 5 * S, "save", 1_000_000, sampled=False)
    found = diagnosed(folder)
    assert not told(found.notes) and found.verdict.rule is not None


def rank_log(
    lengths_s: Sequence[float],
    *,
    silent: Collection[int] = (),
    in_full: bool = False,
    cpu_s: float | None = None,
    samples_every_s: int = 1,
) -> RankLog:
    """A rank that is sampled every 0.25 s except in the ``silent`` steps; of the samples, those of every n-th second were kept."""
    ends = np.cumsum(np.round(np.asarray(lengths_s) * S).astype(np.int64))
    edges = [0, *ends.tolist()]
    events = (Event("fwd", 0, 1000, module=0),) if in_full else ()
    cpu_ns = None if cpu_s is None else round(cpu_s * S)
    steps = [
        Step(number, edges[number], edges[number + 1], events, (), None, cpu_ns)
        for number in range(len(lengths_s))
    ]
    times = np.arange(0, edges[-1], S // 4)
    times = times[~np.isin(np.searchsorted(ends, times, side="right"), list(silent))]
    times = times[times // S % samples_every_s == 0]
    samples = np.stack([times, *[np.zeros_like(times)] * 3], axis=1)
    record = RankRecord("", 0, {"host": "a"})
    return RankLog(0, record, tuple(steps), samples=samples, samples_every_s=samples_every_s)


def suspended(log: RankLog, readings_s: Sequence[float] = ()) -> list[int]:
    """Numbers of the steps in which the rank counts as suspended. ``readings_s``: times of its host's telemetry."""
    readings = [{"t_ns": round(at * S), "host": {"cpu_percent": 10.0}} for at in readings_s]
    hosts = {"a": HostTelemetry(samples=readings)} if readings else {}
    return [step.number for step in exclude_suspended([log], hosts)[0][0].steps if SUSPENDED in step.marks]


LONG = {60: 70.0, 90: 16.0, 120: 16.0, 150: 16.0}
"""Lengths in s of some of 160 steps."""
LENGTHS_S = [LONG.get(number, 5.0) for number in range(160)]


def test_telemetry_that_became_less_frequent_has_no_gap():
    """It was read each second for 150 s, then every 6 s, but not while the launcher was suspended in step 60."""
    late = [at for at in np.arange(150, 900, 6) if not 300 < at < 360]
    log = rank_log(LENGTHS_S)
    unsampled = RankLog(0, log.record, log.steps)
    assert suspended(unsampled, [*range(150), *late]) == [60]


@pytest.mark.parametrize(("cpu_s", "found"), [(5.0, []), (0.1, [40, 60, 80])], ids=["runs", "does not run"])
def test_a_rank_that_computes_while_its_launcher_gets_no_cpu_is_not_suspended(cpu_s, found):
    lengths_s = [8.0 if number in (40, 60, 80) else 1.0 for number in range(100)]
    log = rank_log(lengths_s, silent=(40, 60, 80), in_full=True, cpu_s=cpu_s)
    starts_s = [step.start_ns / S for step in log.steps if step.length_ns > S]
    read = [at for at in range(121) if not any(start + 0.5 < at < start + 7.5 for start in starts_s)]
    assert suspended(log, read) == found


@pytest.mark.parametrize("stalls", [2, 20])
def test_repeated_stalls_in_steps_of_which_only_the_times_were_kept_are_the_job_s_own(stalls):
    """A page fault in the job's own loader holds the interpreter's lock for 4 s."""
    stalled = range(30, 30 + 10 * stalls, 10)
    log = rank_log([4.0 if number in stalled else 0.1 for number in range(300)], silent=stalled)
    assert suspended(log) == ([*stalled] if stalls == 2 else [])


def test_samples_that_were_not_read_are_no_silence():
    """Of every eighth second samples were kept. In step 60 the process was suspended, in the others it waited."""
    assert suspended(rank_log(LENGTHS_S, silent=(60,), in_full=True, cpu_s=0.1, samples_every_s=8)) == [60]
