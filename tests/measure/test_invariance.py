"""What must not matter does not: the clock of a host, the order of files, the base time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpdoctor.measure.flow import measure
from tests.generator import Config, HostClock, Plant, generate
from tests.measure.recorded import Job, late_facts, plant, record
from tests.measure.recorded import measured as measured_run
from tests.measure.traced import found, windows_of

JOB = Config(hosts=(2, 2), steps=5, plants=(Plant("slow_data", ranks=(3,), ms=2.0),))


def findings(measurement):
    """Rank and price of every cause, to a hundredth of a millisecond and without source lines."""
    causes = {
        **found(measurement.facts.late),
        **{f"shared {k}": v for k, v in found(measurement.facts.shared).items()},
    }
    return {name: (cost.ranks, cost.ms_per_step) for name, cost in causes.items() if cost.share > 0.005}


def of(folder, *, reverse=False):
    windows = windows_of(folder, reverse=reverse)
    return findings(measure([], sorted(windows, key=lambda w: w.rank), {}))


def same(a, b, tolerance_ms):
    assert a.keys() == b.keys()
    for name, (ranks, ms) in a.items():
        assert ranks == b[name][0] and ms == pytest.approx(b[name][1], abs=tolerance_ms)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    generate(JOB, folder)
    return folder


@pytest.mark.parametrize("offset_s", [-30.0, 0.0004])
def test_the_clock_of_a_host(offset_s, plain, tmp_path):
    moved = replace(JOB, clocks=(HostClock(), HostClock(round(offset_s * 1e9))))
    generate(moved, tmp_path / "moved")
    same(of(tmp_path / "moved"), of(plain), 0.03)


def test_the_base_time(plain, tmp_path):
    generate(replace(JOB, base_time_ns=1_000_000_000_000_000_000, start_ns=123_456_789), tmp_path / "early")
    same(of(tmp_path / "early"), of(plain), 0.01)


def test_the_order_and_names_of_files(plain, tmp_path):
    same(of(plain, reverse=True), of(plain), 1e-9)
    (tmp_path / "renamed").mkdir()
    for number, path in enumerate(sorted(plain.iterdir(), reverse=True)):
        suffix = "".join(path.suffixes[-3:])
        (tmp_path / "renamed" / f"{number}{suffix}").write_bytes(path.read_bytes())
    same(of(tmp_path / "renamed"), of(plain), 1e-9)


def test_step_logs_of_a_host_moved_by_seconds(tmp_path):
    job = Job(hosts=("a", "b", "a", "b"), extra=plant(3, data=4.0))
    straight, _ = measured_run(record(tmp_path / "straight", job))
    for offset_ns in (-4_000_000_000, 250_000, 9_000_000_000):
        moved, _ = measured_run(record(tmp_path / str(offset_ns), job.changed(offset_ns={"b": offset_ns})))
        same(findings(moved), findings(straight), 0.01)
    assert late_facts(straight)["data"].ranks == [3]
