"""What the ranks' records say of the job."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddpdoctor.measure.metrics import job_facts


def job_of(*environments, hosts="aa", backend="nccl"):
    """Facts of a job whose ranks recorded these variables. ``hosts``: a letter for each rank."""
    infos = [
        {"rank": rank, "environment": each, "backend": backend} for rank, each in enumerate(environments)
    ]
    logs = [
        SimpleNamespace(record=SimpleNamespace(info=info), device_times=[], has_ddp=True, host=host)
        for info, host in zip(infos, hosts, strict=True)
    ]
    return job_facts(logs, [], len(logs))


@pytest.mark.parametrize(
    ("value", "found"),
    [("1", True), ("0", False), ("", False), (" 1 ", True)],
)
def test_a_variable_that_is_set_to_the_value_that_slows(value, found):
    job = job_of({}, {"CUDA_LAUNCH_BLOCKING": value})
    assert bool(job.debugging_variables) is found and job.disabled_paths == []


def test_each_is_listed_once_and_words_in_any_case():
    environment = {
        "TORCH_DISTRIBUTED_DEBUG": "detail",
        "NCCL_NET": "Socket",
        "NCCL_DEBUG": "INFO",
        "NCCL_P2P_LEVEL": "NVL",
    }
    job = job_of(environment, environment, hosts="ab")
    assert (job.debugging_variables, job.disabled_paths) == (
        ["TORCH_DISTRIBUTED_DEBUG=detail"],
        ["NCCL_NET=Socket"],
    )


def test_none_recorded_is_not_none_set():
    job = job_of(None, None)
    assert (job.debugging_variables, job.disabled_paths) == (None, None)


@pytest.mark.parametrize(
    ("hosts", "backend", "found"),
    [
        ("aa", "nccl", ["NCCL_P2P_DISABLE=1"]),
        ("ab", "nccl", ["NCCL_IB_DISABLE=1"]),
        ("aab", "cpu:gloo,cuda:nccl", ["NCCL_IB_DISABLE=1", "NCCL_P2P_DISABLE=1"]),
        ("aab", "gloo", []),
        ("aab", None, []),
    ],
)
def test_a_variable_of_nccl_counts_where_it_has_an_effect(hosts, backend, found):
    environment = {"NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "TRACE"}
    job = job_of(*[environment] * len(hosts), hosts=hosts, backend=backend)
    assert job.disabled_paths == found
    assert job.debugging_variables == (["NCCL_DEBUG=TRACE"] if found else [])
