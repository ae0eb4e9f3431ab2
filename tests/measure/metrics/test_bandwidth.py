"""Bandwidth by the formulas of nccl-tests, from transfer alone."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from ddpdoctor.measure.graph import CycleGroup, Sync
from ddpdoctor.measure.metrics import (
    bandwidth_points,
    bus_factor,
    large_bus_gb_per_s,
    latency_and_rate,
    message_cost,
    transfers,
)
from tests.measure.made import cycles_of, graph_of, on, work_array

HOSTS = ["host"] * 8


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [
        ("allreduce", 2, 1.0),
        ("allreduce", 4, 1.5),
        ("allreduce", 8, 1.75),
        ("allgather", 4, 0.75),
        ("reducescatter", 8, 0.875),
        ("alltoall", 2, 0.5),
        ("broadcast", 8, 1.0),
        ("reduce", 8, 1.0),
        ("allreduce", 1, 1.0),
    ],
)
def test_bus_factor(operation, ranks, factor):
    assert bus_factor(operation, ranks) == factor


def sized(world=4, megabytes=100, transfer_ms=4.0, late_ms=0.0):
    work = work_array(6, 1, world, backward=10.0, data=on(1, world, late_ms))
    group = cycles_of([Sync("gradients", "allreduce", tuple(range(world)))], work, transfer_ms)
    return graph_of(
        CycleGroup(
            group.syncs,
            group.steps,
            group.begin,
            group.arrival,
            group.end,
            work,
            np.full((6, 1), megabytes * 1e6),
        )
    )


@pytest.mark.parametrize("late_ms", [0.0, 50.0])
def test_waiting_for_a_late_rank_is_no_transfer(late_ms):
    (point,) = bandwidth_points(sized(late_ms=late_ms), HOSTS)
    assert (point.operation, point.bytes, point.count) == ("allreduce", 100e6, 6)
    assert point.transfer_ms == pytest.approx(4.0)
    assert point.bus_gb_per_s == pytest.approx(25.0 * 1.5)


def test_unknown_sizes_give_no_bandwidth():
    assert (
        transfers(sized(megabytes=float("nan")), HOSTS) == []
        and bandwidth_points(sized(megabytes=0), HOSTS) == []
    )
    assert large_bus_gb_per_s([]) == (None, None)


def test_larger_messages_are_no_measure_for_those_that_take_longest():
    """As nccl-tests shows it on NVLink: 65 GB/s at 1 MiB, 305 at 256 MiB. That is no slow link."""
    longest, larger, smaller = (
        sized(megabytes=1.1, transfer_ms=60.0),
        sized(megabytes=256, transfer_ms=1.0),
        sized(megabytes=0.1, transfer_ms=1.0),
    )
    points = [point for graph in (longest, larger, smaller) for point in bandwidth_points(graph, HOSTS)]
    taken, best = large_bus_gb_per_s(points)
    assert taken == pytest.approx(1.1 / 60 * 1.5) and best == pytest.approx(0.1 * 1.5)


def test_the_large_that_take_longest_and_the_best_of_smaller_ones():
    points = [
        *bandwidth_points(sized(), HOSTS),
        *bandwidth_points(sized(megabytes=0.01, transfer_ms=0.1), HOSTS),
    ]
    median, best = large_bus_gb_per_s(points)
    assert median == best == pytest.approx(37.5)


def test_latency_and_rate_come_back():
    sizes = np.repeat([1e6, 8e6], 5)
    times = 40_000 + sizes / 20.0
    times[[3, 8]] *= 9  # disturbed messages
    latency, rate = latency_and_rate(sizes, times)
    assert latency == pytest.approx(40_000, rel=0.02) and rate == pytest.approx(20.0, rel=0.02)
    assert latency_and_rate(np.full(9, 1e6), np.full(9, 5e4)) == (5e4, None), (
        "one size says nothing of the rate"
    )


def test_a_few_messages_of_another_size_do_not_tilt_the_line():
    """97 buckets of about 17 kB, and one of 4 kB that met no disturbance: all that is known is what a message takes."""
    sizes = np.array([3_840.0] * 3 + [16_640.0] * 160 + [17_152.0] * 160)
    times_ns = np.array([70_000.0] * 3 + [380_000.0] * 320)
    assert latency_and_rate(sizes, times_ns) == (380_000.0, None)
    many = 2.0 ** np.arange(30)
    assert latency_and_rate(many, 5_000.0 + many)[1] == pytest.approx(1.0, rel=0.01)


def tensor_and_data_parallel():
    """Two hosts of two ranks each: 8 MB go between the ranks of a host at 200 GB/s, and 8 and 64 MB between hosts at 20 GB/s."""
    pairs = [("model", pair) for pair in ((0, 1), (2, 3))] + [
        ("gradients", pair) for pair in ((0, 2), (1, 3))
    ] * 2
    syncs = [Sync(kind, "allreduce", members, group=str(members)) for kind, members in pairs]
    sizes = np.array([8e6] * 4 + [64e6] * 2)
    rates = np.array([200.0] * 2 + [20.0] * 4)
    group = cycles_of(syncs, work_array(6, 6, 4, backward=10.0), np.tile(sizes / rates / 1e6, (6, 1)))
    return graph_of(replace(group, message_bytes=np.tile(sizes, (6, 1))))


def test_links_within_hosts_are_no_measure_of_those_between_them():
    hosts = ["a", "a", "b", "b"]
    graph = tensor_and_data_parallel()
    points = bandwidth_points(graph, hosts)
    assert {(point.hosts, round(point.bus_gb_per_s)) for point in points} == {(1, 200), (2, 20)}
    assert large_bus_gb_per_s(points) == (pytest.approx(20.0), pytest.approx(20.0))
    message = message_cost(graph, hosts)
    latency_us, bytes_per_ns = message.latency_us, message.bytes_per_ns
    assert (latency_us, bytes_per_ns) == (pytest.approx(0.0, abs=0.1), pytest.approx(20.0))


def test_ranks_that_were_not_recorded_are_in_the_group_all_the_same():
    group = sized(world=2).groups[0]
    (sync,) = group.syncs
    (point,) = bandwidth_points(graph_of(replace(group, syncs=(replace(sync, size=64),))), HOSTS)
    assert (point.ranks, point.bus_gb_per_s) == (64, pytest.approx(25.0 * 2 * 63 / 64))


def test_a_broadcast_is_transfer_once_its_root_is_there():
    """Rank 3 comes 30 ms after the others, which do not wait for it."""
    work = work_array(6, 1, 4, forward=np.array([[10.0, 10.0, 10.0, 40.0]]))
    group = cycles_of([Sync("broadcast", "broadcast", (0, 1, 2, 3), root=0)], work, transfer_ms=4.0)
    (point,) = bandwidth_points(graph_of(replace(group, message_bytes=np.full((6, 1), 1e8))), HOSTS)
    assert point.bus_gb_per_s == pytest.approx(25.0)


def test_two_quick_messages_are_no_reference():
    """On a loaded machine, two messages of 2 MB met no disturbance and reached 3.9 GB/s, and those of 4 MB 0.1."""
    slow, quick = sized(megabytes=4, transfer_ms=40.0), sized(megabytes=2, transfer_ms=0.5)
    few = [replace(point, count=2) for point in bandwidth_points(quick, HOSTS)]
    taken, best = large_bus_gb_per_s([*bandwidth_points(slow, HOSTS), *few])
    assert taken == best == pytest.approx(0.1 * 1.5)
