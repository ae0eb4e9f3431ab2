"""The NVML sampler through the real bindings, over the stub driver library."""

from __future__ import annotations

import pytest

SAMPLE = (
    "s = NvmlSampler(); samples = [s.sample()]; result = [s.static, samples, [note.text for note in s.notes]]"
)


def test_static_facts(stub_library, run_with_driver):
    static, _, notes = run_with_driver(stub_library(), SAMPLE)
    assert [gpu["index"] for gpu in static] == [0, 1]
    assert static[1] == {
        "index": 1,
        "uuid": "GPU-1",
        "name": "Stub H100",
        "pci_bus_id": "00000000:02:00.0",
        "memory_total_bytes": 80_000_000_000,
        "pcie_generation_max": 5,
        "pcie_width_max": 16,
    }
    assert notes == []


def test_sample_fields(stub_library, run_with_driver):
    gpu = run_with_driver(stub_library(), "result = NvmlSampler().sample()")[1]
    assert gpu.pop("throttle_reasons") == [
        "gpu_idle",
        "applications_clocks_setting",
        "sw_power_cap",
        "hw_slowdown",
        "sync_boost",
        "sw_thermal_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
        "display_clocks_setting",
    ]
    assert gpu == {
        "index": 1,
        "gpu_utilization_percent": 97,
        "memory_used_bytes": 2_000_000_000,
        "power_watts": pytest.approx(123.45),
        "sm_clock_mhz": 1410,
        "memory_clock_mhz": 2600,
        "temperature_celsius": 61,
        "pcie_generation": 4,
        "pcie_width": 8,
        "ecc_uncorrected_total": 1,
        "xid_errors": [],
    }


def test_a_consumer_gpu_has_nulls_and_one_note(stub_library, run_with_driver):
    _, samples, notes = run_with_driver(stub_library("-DCONSUMER"), SAMPLE)
    gpu = samples[0][0]
    assert gpu["ecc_uncorrected_total"] is None and gpu["gpu_utilization_percent"] == 97
    assert notes == [
        "NVML: Not Supported, first for ecc_uncorrected_total of GPU 0; a field with this error is null."
    ]


def test_an_old_driver_lacks_functions(stub_library, run_with_driver):
    _, samples, notes = run_with_driver(stub_library("-DOLD_DRIVER"), SAMPLE)
    gpu = samples[0][0]
    assert gpu["throttle_reasons"] == ["sw_power_cap", "sw_thermal_slowdown"], "by the older name"
    assert gpu["pcie_generation"] is None and gpu["power_watts"] is not None
    assert notes == [
        "NVML: Function Not Found, first for pcie_generation of GPU 0; a field with this error is null."
    ]


def test_a_gpu_lost_mid_run(stub_library, run_with_driver):
    code = """
s = NvmlSampler()
before = s.sample()
(control / "lost.1").touch()
after, later = s.sample(), s.sample()
(control / "lost.0").touch()
s.sample()
s.close()
result = [before, after, later, [note.text for note in s.notes]]
"""
    before, after, later, notes = run_with_driver(stub_library(), code)
    assert before[1]["power_watts"] is not None
    for sample in (after, later):
        assert sample[0]["power_watts"] is not None, "the other GPU goes on"
        assert sample[1] == {"index": 1, **dict.fromkeys(before[1].keys() - {"index"})}
    lost = [note for note in notes if "GPU is lost" in note]
    assert [note.split(":")[1] for note in lost] == [" GPU 1", " GPU 0"], "each once"


def test_xid_errors_arrive_once_on_their_gpu(stub_library, run_with_driver):
    code = """
s = NvmlSampler()
(control / "xid.1").touch()
result = [[gpu["xid_errors"] for gpu in s.sample()] for _ in range(2)]
"""
    assert run_with_driver(stub_library(), code) == [[[], [79]], [[], []]]


def test_no_gpu_is_one_note(stub_library, run_with_driver):
    (run_with_driver.control / "count").write_text("0")
    static, samples, notes = run_with_driver(stub_library(), SAMPLE + "; s.close()")
    assert (static, samples) == ([], [[]])
    assert len(notes) == 1 and "shows no GPU" in notes[0]


def test_a_missing_or_broken_library_is_one_note(tmp_path, run_with_driver):
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "libnvidia-ml.so.1").write_bytes(b"not a library")
    static, samples, notes = run_with_driver(folder, SAMPLE + "; s.close()")
    assert (static, samples) == ([], [[]])
    assert notes == ["No GPU telemetry: NVML Shared Library Not Found (NVML)."]


def test_an_unknown_call_never_raises(stub_library, run_with_driver):
    code = """
import pynvml
del pynvml.nvmlDeviceGetUtilizationRates
def broken(*_): raise RuntimeError("odd")
pynvml.nvmlDeviceGetPowerUsage = broken
s = NvmlSampler(); result = [s.sample()[0], [note.text for note in s.notes]]
"""
    gpu, notes = run_with_driver(stub_library(), code)
    assert gpu["gpu_utilization_percent"] is None and gpu["power_watts"] is None and gpu["pcie_width"] == 8
    assert any("nvmlDeviceGetUtilizationRates" in note for note in notes)
    assert any(note.startswith("NVML: odd, first for power_watts") for note in notes)


def test_what_a_gpu_does_not_support_is_asked_once(stub_library, run_with_driver):
    code = """
import pynvml
asked, ask = [], pynvml.nvmlDeviceGetTotalEccErrors
pynvml.nvmlDeviceGetTotalEccErrors = lambda *which: (asked.append(1), ask(*which))[1]
s = NvmlSampler()
for _ in range(3): s.sample()
result = len(asked)
"""
    assert run_with_driver(stub_library("-DCONSUMER"), code) == 2, "once on each GPU"
