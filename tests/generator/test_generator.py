"""The generator itself: its ground truth must be physically plausible."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from . import Config, HostClock, Plant, Truth, When, cpu_job, generate
from .cases import LETTERS, all_cases, case
from .kineto import local_clock
from .model import JOB_PLANTS, RANK_PLANTS
from .simulate import simulate

SHORT = Config(steps=4)


def step_us(config: Config) -> float:
    times = simulate(config, record=False).step_us()
    return sum(times) / len(times)


def cost_us(*plants: Plant, config: Config = SHORT) -> float:
    return step_us(replace(config, plants=plants)) - step_us(config)


def load(truth: Truth, rank: int) -> dict:
    return json.loads(gzip.decompress(Path(truth.files[rank]).read_bytes()))


def complete(trace: dict, category: str) -> list[dict]:
    return [event for event in trace["traceEvents"] if event.get("cat") == category and event["ph"] == "X"]


def nccl(trace: dict) -> list[dict]:
    return [event for event in complete(trace, "kernel") if event["name"].startswith("nccl")]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Truth:
    return generate(SHORT, tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="module")
def late(tmp_path_factory) -> Truth:
    config = replace(SHORT, plants=(Plant("slow_data", ranks=(2,), ms=2.0),))
    return generate(config, tmp_path_factory.mktemp("late"))


def test_collectives_end_together_after_the_last_arrival(late):
    assert len(late.collectives) == SHORT.steps * len(SHORT.bucket_bytes)
    for collective in late.collectives:
        assert max(collective.end_us) - min(collective.end_us) <= 4 * SHORT.end_jitter_us
        assert min(collective.end_us) > max(collective.arrival_us)
        assert collective.transfer_us > SHORT.link_latency_us / 2
        assert collective.wait_us[collective.last_rank] == 0.0


def test_transfer_follows_the_ring_formula():
    config = Config(
        jitter=0.0, end_jitter_us=0.0, steps=2, bucket_bytes=(50_000_000,), link_bandwidth_gbps=100.0
    )
    collective = simulate(config).collectives[-1]
    transfer_us = collective.end_us[0] - max(collective.arrival_us.values())
    assert transfer_us == pytest.approx(20.0 + 2 * 3 / 4 * 50_000_000 / 100_000)


def test_collectives_of_one_rank_do_not_overlap(late):
    for rank in range(4):
        for before, after in pairwise(late.collectives):
            assert after.arrival_us[rank] >= before.end_us[rank]


def test_breakdown_adds_up_and_each_part_is_plausible(late):
    for step in late.steps:
        for rank, parts in enumerate(step.breakdown_us):
            assert sum(parts.values()) == pytest.approx(step.end_us[rank] - step.start_us[rank], abs=1e-6)
            assert min(parts.values()) >= 0.0
            kernels_us = SHORT.forward_us + SHORT.backward_us + SHORT.optimizer_us
            assert parts["compute"] == pytest.approx(kernels_us, rel=0.02)


def test_breakdown_shows_the_cause_on_its_rank_and_waiting_on_others(late):
    for step in late.steps:
        assert step.breakdown_us[2]["data_wait"] > 2000.0
        assert step.breakdown_us[2]["comm_wait"] < 200.0
        for rank in (0, 1, 3):
            assert step.breakdown_us[rank]["data_wait"] < 500.0
            assert step.breakdown_us[rank]["comm_wait"] > 1000.0


def test_the_late_rank_causes_the_wait(healthy, late):
    caused_us = late.wait_caused_us()
    assert caused_us.index(max(caused_us)) == 2
    assert caused_us[2] > 20 * sum(healthy.wait_caused_us()) / 4


def test_step_times_without_a_plant_equal_those_of_the_healthy_job(healthy, late):
    (plant,) = late.plants
    assert plant.step_us_without == healthy.step_us == late.step_us_without_any
    assert plant.cost_us_per_step == pytest.approx(2000.0, rel=0.1)
    assert plant.share == pytest.approx(plant.cost_us_per_step / late.mean_step_us)


@pytest.mark.parametrize(
    "kind", ["slow_data", "slow_h2d", "slow_forward", "slow_backward_kernels", "host_gap_forward"]
)
def test_a_rank_late_by_2_ms_costs_about_2_ms(kind):
    assert cost_us(Plant(kind, ranks=(1,), ms=2.0)) == pytest.approx(2000.0, rel=0.1)


@pytest.mark.parametrize("ms", [200.0, 20.0, 5.0])
def test_a_busy_wait_in_the_backward_costs_its_length(ms):
    assert cost_us(Plant("host_gap_backward", ranks=(1,), ms=ms)) == pytest.approx(ms * 1000, rel=0.05)


def test_queued_work_hides_a_host_gap():
    assert cost_us(Plant("host_gap_forward", ranks=(1,), ms=1.0, position=0.8, drain=False)) < 100.0


def test_simultaneous_delays_do_not_add_up_but_successive_ones_do():
    one, other = Plant("slow_data", ranks=(1,), ms=2.0), Plant("slow_data", ranks=(2,), ms=2.0)
    assert cost_us(one, other) == pytest.approx(cost_us(one), rel=0.1)
    more = Plant("host_work_end_of_step", ranks=(1,), ms=2.0)
    assert cost_us(one, more) == pytest.approx(2 * cost_us(one), rel=0.1)


@pytest.mark.parametrize(
    ("plant", "base", "least_us"),
    [
        (Plant("throttled", ranks=(1,), factor=1.5), SHORT, 4000.0),
        (Plant("uneven_work", ranks=(1,), factor=1.5), SHORT, 4000.0),
        (Plant("device_sync_item", count=20), SHORT, 200.0),
        (Plant("explicit_barrier", count=3), SHORT, 150.0),
        (Plant("slow_link", ranks=(0, 1), factor=10.0), SHORT, 5000.0),
        (Plant("many_tiny_buckets", count=500), SHORT, 5000.0),
        (Plant("no_overlap"), SHORT, 1000.0),
        (Plant("communication_bound", factor=20.0), SHORT, 10_000.0),
        (Plant("redundant_sync"), replace(SHORT, accumulation=3), 300.0),
        (Plant("launch_bound", factor=20.0), replace(SHORT, steps=2, world_size=2), 3000.0),
    ],
    ids=lambda value: value.kind if isinstance(value, Plant) else "",
)
def test_other_plants_have_at_least_their_expected_cost(plant, base, least_us):
    assert cost_us(plant, config=base) > least_us


@pytest.mark.parametrize(("kind", "ms"), [("gc_pause", 20.0), ("checkpoint", 10.0)])
def test_a_cause_in_some_steps_does_not_affect_others(kind, ms):
    config = replace(Config(steps=6), plants=(Plant(kind, ranks=(0,), ms=ms, when=When(first=1, every=3)),))
    with_it, without = simulate(config).step_us(), simulate(replace(config, plants=())).step_us()
    slower = [a > b + 1000.0 for a, b in zip(with_it, without, strict=True)]
    # A pause at a step's end is twice in the mean over ranks: in its rank's step and in the next step of the others.
    later = (2, 5) if kind == "checkpoint" else ()
    assert [step for step, slow in enumerate(slower) if slow] == sorted((1, 4, *later))


def test_random_steps_match_the_ground_truth(tmp_path):
    when = When(probability=0.5)
    truth = generate(
        Config(steps=12, world_size=2, plants=(Plant("slow_data", (1,), 5.0, when=when),)), tmp_path
    )
    active = truth.plants[0].active_steps
    assert 0 < len(active) < 12
    slow = [step.index for step in truth.steps if step.breakdown_us[1]["data_wait"] > 4000.0]
    assert slow == active


def test_invalid_plants_are_rejected():
    with pytest.raises(ValueError, match="unknown plant"):
        Plant("gremlins")
    with pytest.raises(ValueError, match="cannot be limited"):
        Plant("no_overlap", when=When(every=2))


def test_only_the_same_seed_gives_the_same_bytes(tmp_path, healthy):
    again = generate(SHORT, tmp_path / "again")
    other = generate(replace(SHORT, seed=1), tmp_path / "other")
    for rank, path in healthy.files.items():
        assert Path(path).read_bytes() == Path(again.files[rank]).read_bytes()
        assert Path(path).read_bytes() != Path(other.files[rank]).read_bytes()


def test_a_trace_has_the_contents_of_a_kineto_trace(healthy):
    trace = load(healthy, 3)
    assert trace["distributedInfo"]["rank"] == 3
    assert trace["distributedInfo"]["world_size"] == 4
    kernels, calls = complete(trace, "kernel"), complete(trace, "cuda_runtime")
    launched = {call["args"]["correlation"]: call for call in calls}
    for kernel in kernels:
        assert launched[kernel["args"]["correlation"]]["ts"] < kernel["ts"]
    operators = {event["args"]["External id"] for event in complete(trace, "cpu_op")}
    assert {kernel["args"]["External id"] for kernel in kernels} <= operators
    flows = [event["id"] for event in trace["traceEvents"] if event["ph"] == "s"]
    assert sorted(flows) == sorted(event["id"] for event in trace["traceEvents"] if event["ph"] == "f")
    names = [event["name"] for event in complete(trace, "user_annotation")]
    assert [name for name in names if name.startswith("ProfilerStep")] == [
        f"ProfilerStep#{n}" for n in range(2, 6)
    ]


def test_kernels_carry_the_metadata_of_their_collective(healthy):
    for rank in range(4):
        kernels = nccl(load(healthy, rank))
        assert [kernel["args"]["Seq"] for kernel in kernels] == [c.sequence for c in healthy.collectives]
        for kernel, collective in zip(kernels, healthy.collectives, strict=True):
            assert kernel["args"]["In msg nelems"] * 4 == collective.bytes
            assert kernel["args"]["Process Group Ranks"] == "[0, 1, 2, 3]"


def test_streams_run_one_kernel_at_a_time(late):
    for rank in range(4):
        for stream in (7, 20):
            events = complete(load(late, rank), "kernel") + complete(load(late, rank), "gpu_memcpy")
            own = sorted((e["ts"], e["dur"]) for e in events if e["args"]["stream"] == stream)
            for (start, duration), (following, _) in pairwise(own):
                assert start + duration <= following + 0.002


def test_clocks_only_shift_and_stretch_the_trace(tmp_path):
    clocks = (HostClock(), HostClock(offset_ns=3_000_000_000, drift_ppm=100.0))
    config = replace(SHORT, hosts=(2, 2), clocks=clocks)
    truth = generate(config, tmp_path)
    assert truth.offset_ns == [0, 3_000_000_000]
    assert truth.step_us == simulate(SHORT).step_us()
    for rank in range(4):
        to_local = local_clock(config, rank)
        for kernel, collective in zip(nccl(load(truth, rank)), truth.collectives, strict=True):
            assert kernel["ts"] == pytest.approx(to_local(collective.arrival_us[rank]) / 1000, abs=0.002)
    shift_us = nccl(load(truth, 2))[0]["ts"] - nccl(load(truth, 0))[0]["ts"]
    assert shift_us == pytest.approx(3_000_000, abs=500)


def test_a_recording_can_lose_its_first_collectives_or_begin_late(tmp_path):
    lost = generate(replace(SHORT, first_collectives_lost={0: 1}), tmp_path / "lost")
    assert [len(nccl(load(lost, rank))) for rank in range(4)] == [19, 20, 20, 20]
    late = generate(replace(SHORT, window_starts_late={1: 2}), tmp_path / "late")
    assert [len(nccl(load(late, rank))) for rank in range(4)] == [20, 18, 20, 20]
    assert len(complete(load(late, 1), "cpu_op")) < len(complete(load(late, 0), "cpu_op"))


def test_a_recording_can_lack_events_ranks_names_and_steps(tmp_path):
    config = replace(
        SHORT,
        dropped_event_fraction=0.2,
        missing_ranks=(3,),
        kernel_metadata=False,
        step_annotations=False,
    )
    truth = generate(config, tmp_path)
    assert sorted(truth.files) == [0, 1, 2] == sorted(int(p.name[5:10]) for p in tmp_path.iterdir())
    trace = load(truth, 0)
    kernels = len(complete(trace, "kernel"))
    every = SHORT.steps * (40 + 80 + 6)
    assert every * 0.7 < kernels - 20 < every * 0.9
    assert len(nccl(trace)) == 20
    assert "Seq" not in nccl(trace)[0]["args"]
    assert not any(e["name"].startswith("ProfilerStep") for e in complete(trace, "user_annotation"))


def test_uncompressed_traces(tmp_path):
    truth = generate(replace(SHORT, compressed=False, steps=1), tmp_path)
    assert json.loads(Path(truth.files[0]).read_text())["schemaVersion"] == 1


def test_a_host_that_never_waits_runs_ahead_until_the_queue_is_full():
    free = replace(SHORT, item_every=0, warmup_steps=0, world_size=2)
    deep, shallow = simulate(free), simulate(replace(free, queue_depth=64))
    assert sum(deep.step_us()[:2]) < 0.5 * sum(shallow.step_us()[:2])
    assert shallow.step_us()[-1] == pytest.approx(step_us(replace(free, item_every=1)), rel=0.1)


@pytest.mark.parametrize("letter", LETTERS)
def test_the_culprit_of_a_case_arrives_last(letter):
    made = case(letter, world_size=4)
    collectives = [c for c in simulate(made.config).collectives if c.step >= 0]
    if made.culprit is None:
        assert made.config.clocks[1].offset_ns == 500_000
        return
    last = [max(c.arrival_us, key=c.arrival_us.__getitem__) for c in collectives]
    per_step = len(made.config.bucket_bytes)
    position = 3 if letter == "F" else 0
    assert set(last[position::per_step]) == {made.culprit}


def test_all_cases_have_unique_names_and_a_trace_of_the_culprit():
    cases = list(all_cases())
    assert len({made.name for made in cases}) == len(cases) > 100
    assert all(made.culprit not in made.config.missing_ranks for made in cases)


@pytest.fixture(scope="module")
def gloo(tmp_path_factory) -> Truth:
    plants = (Plant("host_gap_backward", ranks=(1,), ms=20.0),)
    return generate(cpu_job(steps=4, plants=plants), tmp_path_factory.mktemp("gloo"))


def test_gloo_traces_show_issue_times_on_the_training_thread(gloo):
    for rank in range(4):
        trace = load(gloo, rank)
        assert trace["distributedInfo"]["backend"] == "gloo"
        assert trace["deviceProperties"] == []
        assert not complete(trace, "kernel")
        assert not complete(trace, "cuda_runtime")
        issued = [event for event in complete(trace, "cpu_op") if event["name"] == "c10d::allreduce_"]
        to_local = local_clock(gloo.config, rank)
        for event, collective in zip(issued, gloo.collectives, strict=True):
            assert event["ts"] == pytest.approx(to_local(collective.arrival_us[rank]) / 1000, abs=0.002)
        assert {event["tid"] for event in complete(trace, "cpu_op")} == {41000 + rank}


def test_gloo_events_last_until_the_end_on_two_threads(gloo):
    for rank in range(4):
        trace = load(gloo, rank)
        events = [e for e in complete(trace, "user_annotation") if e["name"] == "gloo:all_reduce"]
        assert len(events) == len(gloo.collectives)
        assert len({event["tid"] for event in events}) == 2
        to_local = local_clock(gloo.config, rank)
        ends = sorted(event["ts"] + event["dur"] for event in events)
        truth = sorted(to_local(collective.end_us[rank]) / 1000 for collective in gloo.collectives)
        assert ends == pytest.approx(truth, abs=0.002)
        for thread in {event["tid"] for event in events}:
            own = sorted((e["ts"], e["dur"]) for e in events if e["tid"] == thread)
            assert all(start + dur <= following for (start, dur), (following, _) in pairwise(own))


def test_gloo_breakdown_adds_up_and_the_busy_rank_does_not_wait(gloo):
    for step in gloo.steps:
        for rank, parts in enumerate(step.breakdown_us):
            assert sum(parts.values()) == pytest.approx(step.end_us[rank] - step.start_us[rank], abs=1e-6)
            assert (parts["host"] > 20_000.0) == (rank == 1)
            assert (parts["comm_wait"] > 15_000.0) == (rank != 1)
    assert gloo.plants[0].cost_us_per_step == pytest.approx(20_000.0, rel=0.05)


def test_accelerator_causes_are_rejected_on_cpus():
    with pytest.raises(ValueError, match="needs an accelerator"):
        cpu_job(plants=(Plant("slow_h2d", ranks=(0,), ms=1.0),))


@pytest.mark.parametrize("kind", sorted({*RANK_PLANTS, *JOB_PLANTS} - {"slow_h2d", "device_sync_item"}))
def test_all_other_causes_work_on_cpus(kind):
    plant = Plant(kind, ranks=(1,), ms=5.0, factor=3.0, count=64)
    job = cpu_job(steps=2, accumulation=2)
    assert step_us(replace(job, plants=(plant,))) > 1.02 * step_us(job)


def test_tensor_and_data_parallel_groups_have_their_own_collectives(tmp_path):
    config = Config(world_size=8, steps=2, tensor_parallel=2, metric_allreduce=True)
    plants = (Plant("slow_data", ranks=(5,), ms=2.0),)
    truth = generate(replace(config, plants=plants), tmp_path)
    sizes = {(c.purpose.split()[0], len(c.ranks)) for c in truth.collectives}
    assert sizes == {("bucket", 4), ("activations", 2), ("metric", 8)}
    for collective in truth.collectives:
        assert collective.last_rank in collective.ranks
        assert min(collective.end_us) > max(collective.arrival_us)
    trace = load(truth, 5)
    groups = trace["distributedInfo"]["pg_config"]
    assert [group["ranks"] for group in groups] == [list(range(8)), [1, 3, 5, 7], [4, 5]]
    seen = {(e["args"]["Process Group Name"], e["args"]["Seq"]) for e in nccl(trace)}
    assert seen == {(c.group, c.sequence) for c in truth.collectives if 5 in c.ranks}
    first_wait = next(c for c in truth.collectives if c.step == 0 and c.ranks == [4, 5])
    assert first_wait.last_rank == 5
