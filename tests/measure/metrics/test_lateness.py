"""Lateness counts once, for the rank that caused it: two hosts with two ranks each, whose times follow from the arithmetic below."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.measure.graph import Sync
from ddpdoctor.measure.metrics import lateness
from ddpdoctor.measure.replay import without_work
from ddpdoctor.measure.taxonomy import SyncKind
from tests.measure.made import MS, cycles_of, gain_ns, graph_of, work_array

HOST_A, HOST_B, ALL = (0, 1), (2, 3), (0, 1, 2, 3)
BASE_MS = 10.0


def sync(members, root=None):
    return Sync(SyncKind.COLLECTIVE, "allreduce", members, group=str(members), root=root)


def job(syncs, more_ms, transfer_ms=1.0):
    """Every rank works ``BASE_MS`` before each of its synchronisations; ``more_ms``: (synchronisation, rank) → additional ms."""
    world = 1 + max(max(of.members) for of in syncs)
    work = np.zeros((4, len(syncs), world))
    for k, of in enumerate(syncs):
        work[:, k, list(of.members)] = BASE_MS
    for (k, rank), ms in more_ms.items():
        work[:, k, rank] += ms
    return graph_of(cycles_of(syncs, work_array(4, len(syncs), world, forward=work), transfer_ms=transfer_ms))


def late_ms(graph):
    return pytest.approx(lateness(graph)[0] / MS, abs=1e-6)


TWO_LEVELS = [sync(HOST_A), sync(HOST_B), sync(ALL)]


def test_within_the_host():
    """Rank 1 arrives at its host's collective 4 ms late. Rank 0 waits there, and arrives at the next as late as rank 1."""
    assert late_ms(job(TWO_LEVELS, {(0, 1): 4.0})) == [0, 4, 0, 0]


def test_between_the_hosts():
    """Rank 1 is late after its host's collective."""
    assert late_ms(job(TWO_LEVELS, {(2, 1): 4.0})) == [0, 4, 0, 0]


def test_in_both():
    """Its own work takes longer twice, each time by the whole amount."""
    assert late_ms(job(TWO_LEVELS, {(0, 1): 4.0, (2, 1): 3.0})) == [0, 7, 0, 0]


def test_each_rank_of_a_host_in_a_stage():
    """Within the host rank 1 is late for the first, rank 0 for the second collective; each wait is the other's."""
    stages = [sync(HOST_A), sync(HOST_B), sync(HOST_A), sync(HOST_B), sync(ALL)]
    assert late_ms(job(stages, {(0, 1): 4.0, (2, 0): 2.0})) == [2, 4, 0, 0]


def test_in_each_of_two_rounds():
    """All are together after the collective of all ranks, so what comes after it is new."""
    assert late_ms(job(TWO_LEVELS * 2, {(0, 1): 4.0, (4, 3): 3.0})) == [0, 4, 0, 3]


@pytest.mark.parametrize("link_ms", [1.0, 3.0, 6.0])
def test_partly_hidden_by_the_other_hosts_link(link_ms):
    """Rank 1 delays rank 0 by 4 ms. The job waits for it only longer than for the other host's slower link."""
    transfer_ms = [1.0, link_ms, 1.0]
    late = job(TWO_LEVELS, {(0, 1): 4.0}, transfer_ms)
    assert lateness(late)[0][:2] == pytest.approx([0.0, 4.0 * MS])
    removed = np.zeros(late.groups[0].arrival.shape)
    removed[:, 0, 1] = 4.0 * MS
    assert gain_ns(late, without_work([removed])) == pytest.approx(max(0.0, 5.0 - max(link_ms, 1.0)) * MS)


def test_a_whole_host():
    """Both ranks of a host take 4 ms longer. Neither delays the other; with the median of four, each is 2 ms late."""
    assert late_ms(job(TWO_LEVELS, {(0, 0): 4.0, (0, 1): 4.0})) == [2, 2, 0, 0]


def test_carried_through_a_broadcast():
    """The root leaves a broadcast before rank 1 arrives, so that rank 1 is still late for the next collective: once, not twice."""
    assert late_ms(job([sync((0, 1), root=0), sync((0, 1))], {(0, 1): 4.0})) == [0, 4]


def test_made_good_and_late_again():
    """After the broadcast, rank 0 works 3 ms more, and makes rank 1 wait for nothing: only 1 ms of the lateness reaches the collective."""
    graph = job([sync((0, 1), root=0), sync((0, 1))], {(0, 1): 4.0, (1, 0): 3.0})
    assert late_ms(graph) == [0, 4]
    assert graph.groups[0].wait[:, 1, 0] == pytest.approx(1.0 * MS)
