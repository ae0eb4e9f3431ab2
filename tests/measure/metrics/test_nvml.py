"""GPUs of the ranks by what NVML read of them, and where it cannot be told which GPU is whose."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ddpdoctor.measure.metrics import device_errors, gpu_facts, program_errors, throttled_beyond_others


class Host:
    """Telemetry of one host: per GPU (by index) the static facts and the readings of each field."""

    def __init__(self, *gpus, **readings):
        self.gpus = list(gpus)
        self.readings = readings

    def gpu_values(self, index, field):
        values = self.readings.get(field, {}).get(index, [])
        return np.arange(len(values)), values

    def gpu_column(self, index, field):
        times, values = self.gpu_values(index, field)
        return times, np.array(values, float)


def log(rank, device="cuda:0", host="node", steps=(), **info):
    return SimpleNamespace(
        rank=rank, host=host, steps=steps, record=SimpleNamespace(info={"device": device, **info})
    )


def test_a_throttled_gpu_is_named_with_its_reasons():
    """Rank 1's GPU slows down in half of its samples, rank 0's in one of ten: that is none."""
    slow, idle = ["sw_power_cap"], ["gpu_idle"]
    host = Host(
        {"index": 0, "uuid": "GPU-a"},
        {"index": 1, "uuid": "GPU-b"},
        throttle_reasons={0: [["hw_slowdown"], *[[]] * 9], 1: [slow, idle, slow, []]},
        sm_clock_mhz={0: [1900.0, 2100.0], 1: [np.nan, 1000.0]},
    )
    facts = gpu_facts([], [log(0, device_uuid="a"), log(1, "cuda:1", device_uuid="b")], {"node": host})
    assert (facts.throttled_ranks, facts.throttle_reasons) == ([1], ["sw_power_cap"])
    assert facts.throttled_share == pytest.approx(0.5)
    assert facts.sm_clock_share == pytest.approx(1000 / 2000)


def test_a_power_cap_at_full_load_is_neither_heat_nor_the_power_supply():
    """All GPUs are capped; rank 0's has one sample with another reason, rank 1's has half of them."""
    capped, hot = ["sw_power_cap"], ["sw_power_cap", "hw_thermal_slowdown"]
    host = Host(
        {"index": 0, "uuid": "GPU-a"},
        {"index": 1, "uuid": "GPU-b"},
        throttle_reasons={0: [["hw_slowdown"], *[capped] * 9], 1: [capped, hot] * 5},
    )
    logs = [log(0, device_uuid="a"), log(1, "cuda:1", device_uuid="b")]
    facts = gpu_facts([], logs, {"node": host})
    assert (facts.throttled_ranks, facts.throttled_share) == ([0, 1], 1.0)
    assert (facts.heat_or_power_ranks, facts.heat_or_power_reasons) == ([1], ["hw_thermal_slowdown"])
    assert facts.heat_or_power_share == pytest.approx(0.5)


def test_a_link_that_was_once_wide_is_not_narrow():
    """It is narrowed while the GPU idles."""
    gpus = [{"index": i, "uuid": f"GPU-{i}", "pcie_width_max": 16} for i in (0, 1)]
    host = Host(*gpus, pcie_width={0: [1, 16, 1], 1: [8, 8, 4]})
    facts = gpu_facts([], [log(rank, device_uuid=str(rank)) for rank in (0, 1)], {"node": host})
    assert (facts.narrow_link_ranks, facts.pcie_width, facts.pcie_width_max) == ([1], 8.0, 16.0)


def test_errors_are_those_of_the_run():
    """Errors counted before it are not told."""
    host = Host({"index": 0}, ecc_uncorrected_total={0: [5, 5, 7]}, xid_errors={0: [[79], None, [48, 79]]})
    facts = gpu_facts([], [log(0)], {"node": host})
    assert facts.error_ranks == [0]
    assert facts.errors == ["rank 0: 2 uncorrectable memory errors during the run", "rank 0: Xid 48, 79"]


def test_xids_of_programs_do_not_count_against_the_gpu():
    host = Host({"index": 0}, xid_errors={0: [[43], None, [31, 79]]})
    of_program = Host({"index": 0}, xid_errors={0: [[13, 31, 43, 45, 68, 109]]})
    assert gpu_facts([], [log(0)], {"node": host}).errors == ["rank 0: Xid 79"]
    assert gpu_facts([], [log(0)], {"node": of_program}).error_ranks == []
    assert device_errors([log(0)], {"node": host}) == {0: ["Xid 79"]}
    found = program_errors([log(0)], {"node": host})
    assert [text for _, text in found[0]] == ["Xid 43", "Xid 31"] and found[0][0][0] < found[0][1][0]


@pytest.mark.parametrize(
    ("info", "read"),
    [
        ({"device_pci": "0000:1b:00.0"}, 70.0),
        ({}, 30.0),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "1"}}, None),
        ({"device": "cpu"}, None),
        ({"host": "elsewhere"}, None),
    ],
    ids=["by its bus", "by CUDA's index", "some GPUs hidden", "on no GPU", "of a host that was not sampled"],
)
def test_which_gpu_is_a_ranks(info, read):
    host = Host(
        {"index": 0, "pci_bus_id": "00000000:1A:00.0"},
        {"index": 1, "pci_bus_id": "00000000:1B:00.0"},
        gpu_utilization_percent={0: [20.0, 40.0], 1: [70.0]},
    )
    facts = gpu_facts([], [log(0, **info)], {"node": host})
    assert facts.utilization_percent == (pytest.approx(read) if read is not None else None)
    assert (facts.throttled_ranks is None) == (read is None), "nothing read is not nothing found"


def test_a_gpu_that_idles_before_the_steps_is_throttled_in_them():
    seconds = [SimpleNamespace(recorded_ns=(6, 9), marks=())] * 20
    host = Host(
        {"index": 0},
        throttle_reasons={0: [["gpu_idle"]] * 6 + [["sw_power_cap"]] + [[]] * 3},
        gpu_utilization_percent={0: [0.0] * 6 + [80.0] * 4},
    )
    facts = gpu_facts([], [log(0, steps=seconds)], {"node": host})
    assert (facts.utilization_percent, facts.throttled_share) == (80.0, 0.25)


CAPPED, FREE = ["sw_power_cap"], []


@pytest.mark.parametrize(
    ("reasons", "clocks", "expected"),
    [
        ([CAPPED] * 4, [1500.0, 1510.0, 1490.0, 1505.0], []),
        ([CAPPED] * 4, [1500.0, 1510.0, 1200.0, 1505.0], [2]),
        ([FREE, FREE, CAPPED, FREE], [1500.0] * 4, [2]),
        ([CAPPED, FREE], [1500.0, 1500.0], [0]),
        ([CAPPED], [1500.0], []),
    ],
)
def test_a_power_cap_that_all_gpus_share_explains_no_rank(reasons, clocks, expected):
    """At full load each GPU of a job may run at its power cap."""
    ranks = range(len(reasons))
    host = Host(
        *({"index": rank, "uuid": f"GPU-{rank}"} for rank in ranks),
        throttle_reasons={rank: [reasons[rank]] * 10 for rank in ranks},
        sm_clock_mhz={rank: [clocks[rank]] * 10 for rank in ranks},
    )
    logs = [log(rank, device_uuid=str(rank)) for rank in ranks]
    assert throttled_beyond_others(logs, {"node": host}) == expected
