"""The machines while the steps ran, by their own clocks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ddpdoctor.measure.metrics import host_cores, host_facts
from ddpdoctor.measure.steplog import Step
from tests.measure.made import simple

SECOND = 10**9


class Host:
    """Telemetry of one host of 16 cores, read each second."""

    def __init__(self, **columns):
        self.header = {
            "host_facts": {"cpu_count_usable": 16, "cpu_count_logical": 16, "memory_total_bytes": 100}
        }
        self.columns = columns
        self.programs = []

    def other_programs(self):
        return np.arange(len(self.programs)) * SECOND, self.programs

    def host_column(self, field):
        values = self.columns.get(field, [])
        return np.arange(len(values)) * SECOND, np.array(values, float)

    def rank_column(self, rank, field):
        return np.empty(0, np.int64), np.empty(0)


def log(rank, host="a", start=4, end=8, set_by=0, **info):
    """Twenty alike steps in these seconds of the host's clock, which is ahead of the run's by ``set_by`` seconds."""
    step = Step(0, start * SECOND, end * SECOND, (), (), None, None).shifted(-set_by * SECOND)
    return SimpleNamespace(rank=rank, host=host, steps=[step] * 20, record=SimpleNamespace(info=info))


def facts_of(hosts, logs):
    return host_facts(hosts, logs, simple(2), host_cores(hosts, logs))


def test_neither_start_nor_end_of_the_job_counts():
    """All cores are busy in the steps, and one of them in as many seconds before."""
    busy = [6.25] * 4 + [100] * 5 + [0] * 3
    facts = facts_of(
        {"a": Host(cpu_percent=busy, iowait_percent=[90] * 4 + [1] * 5 + [0] * 3)}, [log(0), log(1)]
    )
    assert (facts.cpu_percent, facts.idle_cores) == (pytest.approx(100.0), pytest.approx(0.0))
    assert facts.io_wait_percent == pytest.approx(1.0)


def test_steps_in_which_a_profiler_is_closed_do_not_count():
    """It takes a second or more, in which the job does nothing else."""
    closed = Step(0, 5 * SECOND, 8 * SECOND, (), ("profiler_close",), None, None)
    of_rank = log(0, start=4, end=10)
    of_rank.steps = [*of_rank.steps, closed]
    busy = [6.25] * 5 + [0, 0, 0] + [6.25] * 3
    assert facts_of({"a": Host(cpu_percent=busy)}, [of_rank]).cpu_percent == pytest.approx(6.25)
    of_rank.steps = [closed] * 20
    assert facts_of({"a": Host(cpu_percent=busy)}, [of_rank]).cpu_percent == pytest.approx(6.25 / 4)


def test_a_host_that_swaps_is_not_the_one_that_computes():
    computes = Host(cpu_percent=[90] * 9, memory_used_bytes=[99] * 9, swap_in_bytes_per_s=[0] * 9)
    swaps = Host(
        cpu_percent=[5] * 9,
        memory_used_bytes=[97] * 9,
        swap_in_bytes_per_s=[4e6] * 9,
        iowait_percent=[60] * 9,
    )
    facts = facts_of({"a": computes, "b": swaps}, [log(0), log(1, "b")])
    assert (facts.cpu_percent, facts.swap_bytes_per_s, facts.io_wait_percent) == (90.0, 4e6, 60.0)
    assert facts.memory_used_share == pytest.approx(0.97)


def test_a_host_with_another_clock_is_read_by_its_own():
    hosts = {name: Host(cpu_percent=[10] * 4 + [50] * 5) for name in "ab"}
    logs = [log(0), log(1, "b", set_by=3600)]
    hosts["b"].columns["cpu_percent"][4:] = [75] * 5
    cores = host_cores(hosts, logs)
    assert (cores.host, cores.idle) == ("b", pytest.approx(4.0))
    assert facts_of(hosts, logs).cpu_percent == pytest.approx(75.0)


@pytest.mark.parametrize(("logical", "others"), [(16, 4.0), (64, None)])
def test_what_other_programs_use(monkeypatch, logical, others):
    """Known where the job may use all cores, so that the host's load is theirs."""
    host = Host(cpu_percent=[50] * 9)
    host.header["host_facts"]["cpu_count_logical"] = logical
    monkeypatch.setattr(host, "rank_column", lambda *_: (np.arange(9) * SECOND, np.full(9, 200.0)))
    assert facts_of({"a": host}, [log(0), log(1)]).other_cores == others
    monkeypatch.undo()
    assert facts_of({"a": host}, [log(0), log(1)]).other_cores is None


def test_which_other_programs_use_cores_while_the_steps_run():
    """Means over the readings of these seconds; a program that was among the largest in half of them has half."""
    host = Host(cpu_percent=[50] * 9)

    def used(name, cores, processes=1):
        return {"name": name, "cores": cores, "processes": processes}

    host.programs = [
        [used("before", 9.0)],
        *[None] * 4,
        [used("ffmpeg", 2.0, 2), used("backup", 0.8)],
        None,
        [
            used("ffmpeg", 1.0),
            used("cron", 0.1),
            used("beyond the host's cores", 1e300),
            used("negative", -1.0),
        ],
        None,
    ]
    found = facts_of({"a": host, "b": Host()}, [log(0), log(1, "b")]).other_programs
    assert [(of.name, of.cores, of.processes) for of in found] == [("ffmpeg", 1.5, 2), ("backup", 0.4, 1)]
    host.programs = [None] * 9
    assert facts_of({"a": host}, [log(0)]).other_programs == []


@pytest.mark.parametrize(
    ("stated", "affinity", "idle", "at_most"),
    [
        ({}, 16, 8.0, 8.0),
        ({"cgroup_cpu_limit_cores": 16.0}, 16, 8.0, 8.0),
        ({"cpu_count_usable": 8}, 8, None, 4.0),
        ({"cgroup_cpu_limit_cores": 6.0}, 16, None, 2.0),
        ({}, 3, None, 2.0),
    ],
    ids=[
        "all cores",
        "a limit of all cores",
        "the launcher is limited to some",
        "a container's limit",
        "each rank is pinned to some",
    ],
)
def test_cores_that_the_job_may_not_use_are_not_idle(monkeypatch, stated, affinity, idle, at_most):
    """The ranks use two cores each; half of the host is busy."""
    host = Host(cpu_percent=[50] * 9)
    host.header["host_facts"].update(stated)
    monkeypatch.setattr(host, "rank_column", lambda *_: (np.arange(9) * SECOND, np.full(9, 200.0)))
    logs = [log(rank, cpu_affinity=affinity) for rank in (0, 1)]
    assert facts_of({"a": host}, logs).idle_cores == idle
    assert host_cores({"a": host}, logs).idle == pytest.approx(at_most)
    monkeypatch.undo()
    assert (host_cores({"a": host}, logs) is None) == (idle is None), "how much the job uses is unknown"
