"""DDP's buckets: what another bucket size would save."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from ddpdoctor.measure.attribution import attribute
from ddpdoctor.measure.costs import (
    Context,
    Reduction,
    bucket_savings,
    disturbed_ns,
    favoured_cap_bytes,
    price_all,
)
from ddpdoctor.measure.facts import BucketFacts, Cost
from ddpdoctor.measure.metrics import Cores, MessageCost
from tests.measure.made import NoLines, simple

MIB = 1024 * 1024
MS = 1e6


def simulated_ns(count, total_bytes, backward_ns, latency_ns, rate):
    """Bucket after bucket on one link."""
    link, ready = 0.0, 0.0
    for i in range(1, count + 1):
        ready = backward_ns * i / count
        link = max(link, ready) + latency_ns + total_bytes / count / rate
    return link - backward_ns


def cost(ms):
    return Cost(ms_per_step=ms, share=0.1, speedup=1.1, steps_hit=9, steps_seen=9)


def savings(facts, latency_us, rate, communication, mean_ms, **more):
    """(small buckets, no overlap, favoured cap in bytes)"""
    saved = bucket_savings(facts, MessageCost(latency_us, rate), communication, mean_ms, **more)
    return saved.get("small_buckets"), saved.get("no_overlap")


def exposed_ns(count, *reduction):
    return Reduction(count, *reduction).exposed_ns(count)


def favoured_cap(*reduction):
    return Reduction(1, *reduction).favoured_cap()


def test_literal_answers():
    # One bucket: nothing hides. 100 MB at 10 bytes/ns is 10 ms, and 0.1 ms of latency.
    assert exposed_ns(1, 100e6, 20 * MS, 0.1 * MS, 10.0) == pytest.approx(10.1 * MS)
    # Ten buckets of 1.1 ms each, ready every 2 ms: only the last is exposed.
    assert exposed_ns(10, 100e6, 20 * MS, 0.1 * MS, 10.0) == pytest.approx(1.1 * MS)
    # Without a backward pass to hide behind, each bucket costs its latency.
    assert exposed_ns(10, 100e6, 0.0, 0.1 * MS, 10.0) == pytest.approx(11 * MS)


@pytest.mark.parametrize("count", [1, 2, 7, 40])
@pytest.mark.parametrize("backward_ms", [0, 3, 50])
@pytest.mark.parametrize("latency_us", [5, 400])
def test_exposed_time_is_that_of_a_queue(count, backward_ms, latency_us):
    arguments = (count, 200e6, backward_ms * MS, latency_us * 1e3, 12.0)
    assert exposed_ns(*arguments) == pytest.approx(simulated_ns(*arguments))


@pytest.mark.parametrize("latency_us", [10, 1_000])
@pytest.mark.parametrize("total_mib", [10, 100, 2_000])
@pytest.mark.parametrize("rate", [0.5, 10, 100])
def test_the_favoured_size_is_not_worse_than_the_default(latency_us, total_mib, rate):
    def exposed(cap):
        count = max(1, -(-total_mib * MIB // int(cap)))
        return exposed_ns(count, total_mib * MIB, 30 * MS, latency_us * 1e3, rate)

    cap = favoured_cap(total_mib * MIB, 30 * MS, latency_us * 1e3, rate)
    best = min(exposed(2**i * MIB) for i in range(9))
    assert exposed(cap) <= 1.02 * best + 0.01 * 30 * MS


def test_high_latency_favours_large_and_slow_links_small_buckets():
    assert favoured_cap(100 * MIB, 30 * MS, 2_000_000, 100.0) > favoured_cap(100 * MIB, 30 * MS, 1_000, 5.0)


def test_many_small_buckets_cost_their_latency():
    facts = BucketFacts(
        per_sync=200.0, total_bytes=100e6, backward_ms=10.0, first_ready_share=0.02, syncs_per_step=1.0
    )
    small, unhidden = savings(facts, 150.0, 20.0, cost(25.0), 60.0)
    assert (
        small is not None and unhidden is None and favoured_cap(100e6, 10 * MS, 0.15 * MS, 20.0) > 100e6 / 200
    )
    assert small.ms_per_step <= 25.0 and small.ms_per_step == pytest.approx(23.5, abs=2.0)
    assert small.share == pytest.approx(small.ms_per_step / 60.0)


def test_buckets_that_start_after_the_backward_could_have_been_hidden():
    facts = BucketFacts(
        per_sync=1.0, total_bytes=100e6, backward_ms=30.0, first_ready_share=1.0, syncs_per_step=1.0
    )
    small, unhidden = savings(facts, 20.0, 10.0, cost(10.0), 60.0)
    assert small is None and unhidden is not None and 8.0 < unhidden.ms_per_step < 10.0


@pytest.mark.parametrize(("largest", "saves"), [(60e6, False), (26e6, True)])
def test_one_parameter_is_one_message(largest, saves):
    """An embedding that holds most of the gradients cannot be sent in parts: no bucket size overlaps it."""
    facts = BucketFacts(
        per_sync=1.0, total_bytes=100e6, backward_ms=30.0, first_ready_share=1.0, syncs_per_step=1.0, largest_parameter_bytes=largest
    )  # fmt: skip
    _, unhidden = savings(facts, 20.0, 10.0, cost(10.0), 60.0)
    assert (unhidden is not None) is saves


def test_without_a_measured_message_there_is_no_price():
    facts = BucketFacts(per_sync=200.0, total_bytes=100e6, backward_ms=10.0)
    assert savings(facts, None, 20.0, cost(9.0), 60.0) == (None, None)
    assert savings(facts, 150.0, 20.0, None, 60.0) == (None, None)
    assert savings(BucketFacts(), 150.0, 20.0, cost(9.0), 60.0) == (None, None)


def test_ordinary_buckets_are_left_alone():
    facts = BucketFacts(
        per_sync=4.0, total_bytes=100e6, backward_ms=30.0, first_ready_share=0.2, syncs_per_step=1.0
    )
    small, unhidden = savings(facts, 20.0, 50.0, cost(0.6), 60.0)
    assert small is None and unhidden is None


def test_issuing_many_buckets_costs_the_computing_thread_too():
    """Hidden or not: 100 issues of 0.1 ms become one, but for the part that goes with the bytes."""
    facts = BucketFacts(per_sync=100.0, total_bytes=1e6, backward_ms=40.0, syncs_per_step=1.0)
    without, _ = savings(facts, 200.0, 1.0, cost(20.0), 60.0)
    with_issues, _ = savings(facts, 200.0, 1.0, cost(20.0), 60.0, issue_ns=0.1 * MS)
    fixed_share = 0.2 / (0.2 + 0.01)
    assert with_issues.ms_per_step - without.ms_per_step == pytest.approx(99 * 0.1 * fixed_share)


def test_disturbances_go_with_the_messages_that_they_meet():
    """A third of the messages' time is beyond the usual; fewer messages save that part of it, too."""
    facts = BucketFacts(per_sync=100.0, total_bytes=1e6, backward_ms=40.0, syncs_per_step=1.0)
    calm, _ = savings(facts, 200.0, 1.0, cost(20.0), 60.0)
    busy, _ = savings(facts, 200.0, 1.0, cost(20.0), 60.0, disturbed_ms=10.0)
    assert busy.ms_per_step == pytest.approx(1.5 * calm.ms_per_step)


def test_what_is_beyond_the_usual_transfer():
    """Every fifth reduction takes 9 ms instead of 2."""
    transfer = np.where(np.arange(40) % 5 == 0, 9.0, 2.0)[:, None]
    assert disturbed_ns(simple(4, transfer_ms=transfer)) == pytest.approx(7.0 / 5 * MS)
    assert disturbed_ns(simple(4)) == 0.0


@pytest.mark.parametrize(
    ("cores", "left"), [(None, 1.0), (Cores(1.9, 0.1, 2, 2.0), 0.0), (Cores(2.0, 14.0, 2, 2.0), 1.0)]
)
def test_a_transfer_by_threads_needs_cores_to_run_beside_the_computation(cores, left):
    """On two busy cores, smaller buckets only take them from the backward pass."""
    graph = simple(2)
    context = Context(graph, attribute(graph), NoLines(), cores=cores)
    gain_ns = 0.05 * graph.mean_cycle_ns
    assert context.overlappable_transfer_ns(gain_ns) == pytest.approx(left * gain_ns)


def test_small_messages_on_hosts_cost_what_their_exposed_transfer_shows():
    """122 messages of 7 KiB, each 268 us by itself, leave 104 ms exposed: their threads wait for a core before each."""
    facts = BucketFacts(per_sync=122.0, total_bytes=880 * 1024.0, backward_ms=10.0, syncs_per_step=1.0)
    message = MessageCost(268.0, 0.5)
    of_devices = bucket_savings(facts, message, cost(104.0), 141.0)["small_buckets"]
    of_hosts = bucket_savings(facts, message, cost(104.0), 141.0, host_timed=True)["small_buckets"]
    assert of_devices.ms_per_step == pytest.approx(121 * 0.268, rel=0.05)
    assert of_hosts.ms_per_step == pytest.approx(101, rel=0.03)
    large = replace(facts, total_bytes=122 * 4.0 * 2**20)
    assert bucket_savings(large, message, cost(104.0), 141.0, host_timed=True) == bucket_savings(
        large, message, cost(104.0), 141.0
    )


def test_the_recommended_size_and_the_price_assume_the_same_backward_pass():
    """If a trace has no autograd functions, its length is estimated for both; 0 would recommend one bucket of everything."""
    job = simple(2, forward=20.0, backward=0.0, transfer_ms=10.0)
    facts = BucketFacts(per_sync=40.0, total_bytes=100e6, median_bytes=2.5e6)
    context = Context(job, attribute(job), NoLines(), reductions=facts, message=MessageCost(50.0, 10.0))
    cap = favoured_cap_bytes(context, price_all(context))
    assert cap is not None and cap < 100e6
