"""Ranks that were stopped from outside: set aside and told. A stall of the job's own stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.analysis import Options, analyze
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
    pairs_first(("slow-data-one-rank", "healthy"), (3 * S, 3480 * S), (None, (0,), (1,))),
)
def test_a_pause_changes_no_verdict(tmp_path, expected, name, ns, ranks):
    folder = copied(FIXTURES / name, tmp_path / "run")
    suspend(folder, STEP, ns, ranks)
    found, wanted = diagnosed(folder), expected[name]
    (note,) = told(found.notes)
    length = "3 s" if ns == 3 * S else "58 min"
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
