"""A wall clock that is set, or slewed, in the middle of a run changes nothing that is measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddpdoctor.analysis import Options, analyze
from tests.measure.clocks import copied, length_of, set_clock, slew_clock, start_of
from tests.measure.grids import pairs_first
from tests.measure.recorded import EPOCH_NS, Job, late_facts, measured, plant, record
from tests.measure.steplogs import lines_of, log_of, write_lines

FIXTURES = Path(__file__).parents[3] / "fixtures"
S = 1_000_000_000


def diagnosed(folder: Path):
    return analyze(str(folder), Options(cache=False, jobs=1))


def same_diagnosis(found, expected):
    """But for what the notes say of the clock."""
    assert (found.healthy, found.verdict) == (expected.healthy, expected.verdict)
    assert (found.steps.count, found.steps.measured) == (expected.steps.count, expected.steps.measured)
    assert found.steps.set_aside == expected.steps.set_aside
    assert (found.steps.mean_ms, found.steps.median_ms, found.steps.p95_ms) == pytest.approx(
        (expected.steps.mean_ms, expected.steps.median_ms, expected.steps.p95_ms), abs=1e-4
    )
    assert found.breakdown == pytest.approx(expected.breakdown, abs=1e-6)
    assert [
        (finding.rule, finding.ranks, [(where.file, where.line) for where in finding.where])
        for finding in found.findings
    ] == [
        (finding.rule, finding.ranks, [(where.file, where.line) for where in finding.where])
        for finding in expected.findings
    ]
    assert [finding.costs_ms_per_step for finding in found.findings] == pytest.approx(
        [finding.costs_ms_per_step for finding in expected.findings], abs=1e-3
    )
    for drawn, wanted in (
        (found.series.step_ms, expected.series.step_ms),
        (found.series.late_ms, expected.series.late_ms),
    ):
        assert np.allclose(np.array(drawn, float), np.array(wanted, float), atol=2e-4, equal_nan=True)
    assert [span.name for span in found.timeline.spans] == [span.name for span in expected.timeline.spans]


@pytest.fixture(scope="module")
def expected():
    names = ("slow-data-one-rank", "rank0-host-work", "healthy")
    return {name: diagnosed(FIXTURES / name) for name in names}


@pytest.mark.parametrize(
    ("name", "by_s", "share"),
    pairs_first(("slow-data-one-rank", "rank0-host-work", "healthy"), (-10, 120, -0.05), (0.2, 0.9)),
)
def test_a_clock_that_is_set_in_the_middle(tmp_path, expected, name, by_s, share):
    folder = copied(FIXTURES / name, tmp_path / "run")
    step = round(expected[name].steps.count * share)
    set_clock(folder, (start_of(folder, step) + length_of(folder, step) // 3, round(by_s * S)))
    found = diagnosed(folder)
    same_diagnosis(found, expected[name])
    told = [note for note in found.notes if note.startswith("The clock of host")]
    assert len(told) == (abs(by_s) > 1)
    if told:
        assert ("forward by 2 min" if by_s > 0 else "back by 10 s") in told[0] and f"step {step}." in told[0]


def test_a_clock_that_is_set_while_a_step_begins(tmp_path, expected):
    """One rank reads it before, the other behind."""
    folder = copied(FIXTURES / "slow-data-one-rank", tmp_path / "run")
    first, second = (start_of(folder, 60, rank) for rank in (0, 1))
    set_clock(folder, (max(first, second), -10 * S))
    same_diagnosis(diagnosed(folder), expected["slow-data-one-rank"])


def test_a_clock_that_is_set_again_and_again(tmp_path, expected):
    folder = copied(FIXTURES / "slow-data-one-rank", tmp_path / "run")
    set_clock(folder, *((start_of(folder, step), by_s * S) for step, by_s in ((9, 40), (40, -3), (70, 5))))
    same_diagnosis(diagnosed(folder), expected["slow-data-one-rank"])


def test_a_clock_that_is_slewed(tmp_path, expected):
    folder = copied(FIXTURES / "slow-data-one-rank", tmp_path / "run")
    slew_clock(folder, start_of(folder, 30), 500e-6)
    same_diagnosis(diagnosed(folder), expected["slow-data-one-rank"])


@pytest.mark.parametrize("by_s", [-10, 120])
@pytest.mark.parametrize("host", ["a", "b"])
def test_of_two_hosts_one_is_set(tmp_path, host, by_s):
    job = Job(
        hosts=("a", "a", "b", "b"), offset_ns={"b": 400 * 1_000_000}, steps=120, extra=plant(3, data=6.0)
    )
    plain, _ = measured(record(tmp_path / "plain", job))
    folder = record(tmp_path / "run", job)
    set_clock(folder, (start_of(folder, 50, 0 if host == "a" else 2) + 9_000_000, by_s * S), host=host)
    found, notes = measured(folder)
    assert late_facts(found).keys() == late_facts(plain).keys()
    assert found.facts.late.data.ranks == [3]
    assert found.facts.late.data.ms_per_step == pytest.approx(6.0, abs=0.05)
    assert found.facts.steps == plain.facts.steps
    assert any(note.startswith(f"The clock of host {host} was set") for note in notes)


def without(folder: Path, ranks, numbers) -> None:
    """Leave these steps out of the ranks' logs."""
    for rank in ranks:
        path = log_of(folder, rank)
        write_lines(path, [line for line in lines_of(path) if line.get("step") not in numbers])


@pytest.mark.parametrize(
    ("gone", "by_s"),
    [((0,), -10), ((2,), 120), ((0, 1), 120), ((2, 3), -10), ((0, 1, 2, 3), -10), ((0, 1, 2, 3), 120)],
)
def test_a_clock_that_is_set_where_ranks_lack_steps(tmp_path, gone, by_s):
    """The wall clock bridges a gap; where another rank of the host has the steps, or another host, it is known better."""
    job = Job(hosts=("a", "a", "b", "b"), steps=140, extra=plant(3, data=6.0))
    plain = record(tmp_path / "plain", job)
    folder = record(tmp_path / "run", job)
    setting = (start_of(folder, 100) + 5_000_000, by_s * S)
    set_clock(folder, setting, host="b" if min(gone) == 2 else "a")
    for run in (plain, folder):
        without(run, gone, range(90, 110))
    wanted, _ = measured(plain)
    found, _ = measured(folder)
    assert found.facts.steps.measured == wanted.facts.steps.measured
    assert found.facts.steps.mean_ms == pytest.approx(wanted.facts.steps.mean_ms, abs=0.01)
    assert late_facts(found).keys() == late_facts(wanted).keys()
    assert found.facts.late.data.ms_per_step == pytest.approx(6.0, abs=0.05)


def test_times_of_a_run_never_go_back(tmp_path):
    folder = record(tmp_path / "run", Job(world=2, steps=40))
    set_clock(folder, (EPOCH_NS + 400_000_000, -3600 * S))
    found, _ = measured(folder)
    for steps in found.graphs.primary.steps:
        assert (steps.start[1:] == steps.end[:-1]).all()
