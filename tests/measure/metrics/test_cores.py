"""What a machine has cores for: the step that work moved beside it cannot go below."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ddpdoctor.measure.metrics import Cores, host_cores

SECOND = 10**9


class Host:
    """Telemetry of one host, read each second: busy per cent of all its cores, per cent of one core of each rank."""

    def __init__(self, cores, busy, ranks=None):
        self.header = {"host_facts": {"cpu_count_usable": cores, "cpu_count_logical": cores}}
        self.busy, self.ranks = busy, ranks or {}

    def host_column(self, field):
        return self._column(self.busy)

    def rank_column(self, rank, field):
        return self._column(self.ranks.get(rank, [np.nan] * len(self.busy)))

    def _column(self, values):
        return np.arange(len(values)) * SECOND, np.array(values, float)


def log(rank, host="a", threads=1, start=2, end=6):
    step = SimpleNamespace(recorded_ns=(start * SECOND, end * SECOND), marks=())
    record = SimpleNamespace(info={"threads": {"torch": threads}} if threads else {})
    return SimpleNamespace(rank=rank, host=host, steps=[step] * 20, record=record)


@pytest.mark.parametrize(("job", "idle", "least"), [(2.0, 0.0, 100.0), (1.5, 0.5, 75.0), (2.0, 14.0, 12.5)])
def test_work_that_is_moved_still_needs_its_cores(job, idle, least):
    assert Cores(job=job, idle=idle, ranks=2, computing=2.0).shortest_step(100.0) == pytest.approx(least)


@pytest.mark.parametrize(
    ("cores", "share"),
    [(Cores(1.8, 0.2, 2, 2.0), 0.0), (Cores(2.0, 1.0, 2, 2.0), 0.5), (Cores(2.0, 14.0, 2, 8.0), 1.0)],
)
def test_a_transfer_hides_where_the_computation_leaves_a_core(cores, share):
    assert cores.hidden_share == pytest.approx(share)


def test_unknown_threads_hide_nothing_away():
    assert Cores(2.0, 0.0, 2, None).hidden_share == 1.0


def test_what_the_job_uses_is_told_from_what_others_use():
    """Two cores of four are another program's: they are neither idle nor the job's."""
    host = Host(4, [0, 0, 75, 75, 75, 75, 75, 0], {0: [50] * 8, 1: [50] * 8})
    cores = host_cores({"a": host}, [log(0), log(1)])
    assert (cores.job, cores.idle, cores.computing) == (pytest.approx(1.0), pytest.approx(1.0), 2.0)


def test_the_start_of_the_job_does_not_count():
    cores = host_cores({"a": Host(2, [5, 5, 100, 100, 100, 100, 100, 5])}, [log(0), log(1)])
    assert cores.idle == pytest.approx(0.0) and cores.job == pytest.approx(2.0)


def test_the_host_with_the_fewest_cores_to_spare_counts():
    hosts = {"a": Host(8, [20] * 8), "b": Host(8, [90] * 8)}
    assert host_cores(hosts, [log(0, "a"), log(1, "b")]).idle == pytest.approx(0.8)


def test_what_was_not_read_is_unknown():
    assert host_cores({}, [log(0)]) is None
    assert host_cores({"a": Host(2, [np.nan] * 8)}, [log(0)]) is None
    assert host_cores({"a": Host(2, [50, 50])}, [log(0)]) is None
    assert host_cores({"a": Host(2, [50] * 8)}, [log(0, threads=0)]).computing is None
