"""One planted cause gives one top finding; what follows from it names it, and healthy jobs stay healthy."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ddpdoctor.diagnose.diagnosis import Coverage
from ddpdoctor.diagnose.engine import Outcome, diagnose
from ddpdoctor.diagnose.load import load_rules
from ddpdoctor.diagnose.selftest import with_cost_shares
from ddpdoctor.diagnose.verdict import verdict
from ddpdoctor.measure.facts import Facts

PACK = load_rules(entry_points=False)
COVERAGE = Coverage(steps=100, ranks=4)

HEALTHY: dict[str, Any] = {
    "job": {"world_size": 4, "ranks_seen": 4, "hosts": 1, "backend": "gloo", "device": "cpu", "is_ddp": True},
    "steps": {"mean_ms": 100.0, "median_ms": 99.0, "seen": 110, "measured": 100, "micro_batches": 1.0},
    "late": {"compute": {"ms_per_step": 1.1}, "total": {"ms_per_step": 1.5}},
    "shared": {
        "data": {"ms_per_step": 0.4},
        "communication": {"ms_per_step": 6.0},
        "host": {"ms_per_step": 2.0},
    },
    "communication": {
        "wait_ms": 1.0,
        "transfer_ms": 6.0,
        "total_transfer_ms": 20.0,
        "hidden_share": 0.7,
        "bus_gb_per_s": 1.0,
        "best_bus_gb_per_s": 1.4,
        "latency_us": 100.0,
        "slow_link_ranks": [],
    },
    "buckets": {"per_sync": 4.0, "syncs_per_step": 1.0},
    "loader": {"num_workers": 2, "persistent_workers": True, "wait_ms": 0.4, "pin_memory": False},
    "ddp": {
        "find_unused_parameters": False,
        "unused_parameter_bytes": 0.0,
        "gradient_as_bucket_view": False,
        "parameters_bytes": 4e7,
    },
    "host": {
        "cores": 16.0,
        "ranks_per_host": 4.0,
        "idle_cores": 6.0,
        "run_delay_share": 0.02,
        "threads_per_rank": 2.0,
    },
}


def outcome(**changed: dict[str, Any]) -> Outcome:
    groups = {name: {**HEALTHY.get(name, {}), **changed.get(name, {})} for name in {*HEALTHY, *changed}}
    result = diagnose(msgspec.convert(with_cost_shares(groups), Facts), PACK, coverage=COVERAGE)
    assert not result.errors
    return result


def test_a_healthy_job_is_called_healthy() -> None:
    result = outcome()
    healthy, sentence = verdict(result, coverage=COVERAGE)
    assert healthy
    assert sentence.rule is None
    assert sentence.headline.startswith("Healthy: ")
    assert "100 steps of 4 ranks" in sentence.headline
    assert not result.findings
    assert f"{len(result.checked)} checks found nothing, " in sentence.headline, (
        "as the last line of a report counts"
    )
    few = msgspec.structs.replace(result, checked=result.checked[:5])
    assert verdict(few, coverage=COVERAGE)[1].headline.startswith("No problem found, but only 5 of ")


def test_what_takes_much_of_the_step_without_a_warning_is_not_called_nothing() -> None:
    result = outcome(shared={"cpu_starved": {"ms_per_step": 30.0}}, host={"run_delay_share": 0.4})
    healthy, sentence = verdict(result, coverage=COVERAGE)
    assert healthy and [finding.severity for finding in result.findings] == ["info"]
    assert (
        "No warnings" in sentence.headline
        and "wait up to 30 ms per step for a free core" in sentence.headline
    )
    assert "Healthy" not in sentence.headline


@pytest.mark.parametrize(
    ("expected", "changed"),
    [
        ("dataloader/one-rank-late", {"late": {"data": {"ms_per_step": 8.0, "ranks": [1]}}}),
        ("dataloader/starved", {"shared": {"data": {"ms_per_step": 8.0}}}),
        ("rank-imbalance/slow-compute", {"late": {"compute": {"ms_per_step": 12.0, "ranks": [1]}}}),
        (
            "rank-imbalance/uneven-work",
            {
                "late": {
                    "compute": {"ms_per_step": 9.0, "ranks": [1]},
                    "uneven": {"ms_per_step": 8.0, "ranks": [1]},
                }
            },
        ),
        ("rank-imbalance/host-work", {"late": {"host": {"ms_per_step": 8.0, "ranks": [0]}}}),
        ("rank-imbalance/garbage-collection", {"late": {"collection": {"ms_per_step": 8.0, "ranks": [0]}}}),
        ("allreduce/late-rank", {"late": {"unknown": {"ms_per_step": 8.0, "ranks": [0]}}}),
        ("sync/checkpoint", {"late": {"checkpoint": {"ms_per_step": 8.0, "ranks": [0]}}}),
        ("sync/explicit-barrier", {"shared": {"barrier": {"ms_per_step": 8.0}}}),
        ("sync/blocking-collective", {"shared": {"collective": {"ms_per_step": 8.0}}}),
        ("sync/buffer-broadcast", {"shared": {"broadcast": {"ms_per_step": 8.0}}}),
        (
            "dataloader/worker-restart",
            {"loader": {"persistent_workers": False}, "shared": {"data_epoch_start": {"ms_per_step": 8.0}}},
        ),
    ],
)
def test_one_cause_is_the_only_warning(expected: str, changed: dict[str, Any]) -> None:
    result = outcome(**changed)
    assert [finding.rule for finding in result.findings if finding.severity != "info"] == [expected]
    healthy, sentence = verdict(result, coverage=COVERAGE)
    assert not healthy
    assert sentence.rule == expected


@pytest.mark.parametrize("cause", ["small_buckets", "redundant_sync", "no_overlap"])
def test_exposed_communication_follows_from_what_makes_it_long(cause: str) -> None:
    rule = {
        "small_buckets": "allreduce/small-buckets",
        "redundant_sync": "allreduce/redundant-sync",
        "no_overlap": "allreduce/not-overlapped",
    }[cause]
    result = outcome(
        communication={"hidden_share": 0.1},
        buckets={"per_sync": 40.0, "syncs_per_step": 4.0},
        shared={"communication": {"ms_per_step": 30.0}, cause: {"ms_per_step": 18.0}},
    )
    assert [(finding.rule, finding.caused_by) for finding in result.findings] == [
        (rule, None),
        ("allreduce/communication-bound", rule),
    ]


ON_DEVICES = {"device": "cuda", "backend": "nccl"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {
                "buckets": {"per_sync": 40.0},
                "shared": {"communication": {"ms_per_step": 30.0}, "small_buckets": {"ms_per_step": 5.0}},
            },
            [("allreduce/communication-bound", None), ("allreduce/small-buckets", None)],
        ),
        (
            {"job": ON_DEVICES, "gpu": {"busy_share": 0.3}, "shared": {"data": {"ms_per_step": 55.0}}},
            [("dataloader/starved", None), ("gpu/low-utilisation", "dataloader/starved")],
        ),
        (
            {
                "job": ON_DEVICES,
                "gpu": {"busy_share": 0.8},
                "shared": {"device_sync": {"ms_per_step": 5.0}, "host": {"ms_per_step": 30.0}},
            },
            [("host/python-work", None), ("sync/device-sync", None)],
        ),
    ],
    ids=["a small part explains nothing", "idle GPUs are an effect", "a host that is too slow in any case"],
)
def test_causes_and_effects(changed: dict[str, Any], expected: list[tuple[str, str | None]]) -> None:
    assert [(finding.rule, finding.caused_by) for finding in outcome(**changed).findings] == expected


@pytest.mark.parametrize(
    ("fact", "rule"),
    [
        ("device_sync", "sync/device-sync"),
        ("barrier", "sync/explicit-barrier"),
        ("collective", "sync/blocking-collective"),
    ],
)
def test_work_of_the_host_shows_because_it_waits(fact: str, rule: str) -> None:
    result = outcome(
        job=ON_DEVICES,
        gpu={"busy_share": 0.8, "kernels_per_step": 900.0, "median_kernel_us": 20.0},
        shared={fact: {"ms_per_step": 17.0}, "host": {"ms_per_step": 12.0}, "launch": {"ms_per_step": 4.0}},
    )
    assert [(finding.rule, finding.caused_by) for finding in result.findings] == [
        (rule, None),
        ("gpu/launch-bound", rule),
        ("host/python-work", rule),  # an upper bound
    ]


@pytest.mark.parametrize(("ran_ms", "cause"), [(9.0, "host/cpu-starved"), (18.0, None)])
def test_waiting_for_a_core_is_no_python(ran_ms: float, cause: str | None) -> None:
    host = {"ms_per_step": 24.0, "own_ms": 24.0, "awake_ms": 24.0}
    result = outcome(
        steps={"operators_seen": True},
        shared={"host": host, "cpu_starved": {"ms_per_step": 22.0}},
        host={"run_delay_share": 0.6, "thread_cpu_ms": ran_ms},
    )
    assert {finding.rule: finding.caused_by for finding in result.findings} == {
        "host/cpu-starved": None,
        "host/python-work": cause,
    }
    assert f"ran for at most {ran_ms:.2g} ms per step" in next(
        finding.explanation for finding in result.findings if finding.rule == "host/python-work"
    )


def test_two_causes_are_both_named_by_cost() -> None:
    result = outcome(
        late={"data": {"ms_per_step": 12.0, "ranks": [2]}}, shared={"barrier": {"ms_per_step": 7.0}}
    )
    assert [finding.rule for finding in result.findings] == [
        "dataloader/one-rank-late",
        "sync/explicit-barrier",
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {
            "steps": {"mean_ms": 1.0},
            "late": {"compute": None, "total": None},
            "shared": {"communication": {"ms_per_step": 0.5}, "data": {"ms_per_step": 0.3}, "host": None},
        },
        {"late": {"host": {"ms_per_step": 6.0, "persistence": "random", "steps_hit": 1, "steps_seen": 1000}}},
        {
            "late": {
                "compute": {
                    "ms_per_step": 6.0,
                    "ranks": [3],
                    "persistence": "random",
                    "steps_hit": 25,
                    "steps_seen": 100,
                    "occurrence_ms": 24.0,
                }
            }
        },
        {
            "job": {"world_size": 1, "ranks_seen": 1},
            "late": {"data": None},
            "communication": {"transfer_ms": None},
        },
    ],
    ids=["steps of 1 ms", "one slow step in a thousand", "noise", "one rank"],
)
def test_traps_stay_silent(changed: dict[str, Any]) -> None:
    result = outcome(**changed)
    assert all(finding.severity == "info" for finding in result.findings)
    assert verdict(result, coverage=COVERAGE)[0]
