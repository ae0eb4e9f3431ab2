"""What the ranks' records say of the job."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddpdoctor.measure.metrics import job_facts


def job_of(*environments):
    """Facts of a job whose ranks recorded these variables."""
    infos = [{"rank": rank, "environment": each} for rank, each in enumerate(environments)]
    logs = [
        SimpleNamespace(record=SimpleNamespace(info=info), device_times=[], has_ddp=True, host="a")
        for info in infos
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
    job = job_of(environment, environment)
    assert (job.debugging_variables, job.disabled_paths) == (
        ["TORCH_DISTRIBUTED_DEBUG=detail"],
        ["NCCL_NET=Socket"],
    )


def test_none_recorded_is_not_none_set():
    job = job_of(None, None)
    assert (job.debugging_variables, job.disabled_paths) == (None, None)
