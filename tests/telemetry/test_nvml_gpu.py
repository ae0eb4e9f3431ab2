"""The NVML sampler on a real device."""

from __future__ import annotations

import pytest

from ddpdoctor.telemetry.nvml import NvmlSampler

pytestmark = pytest.mark.gpu


@pytest.fixture
def sampler():
    sampler = NvmlSampler()
    if not sampler.static:
        pytest.skip("; ".join(map(str, sampler.notes)))
    yield sampler
    sampler.close()


def test_static_facts(sampler):
    for gpu in sampler.static:
        assert gpu["uuid"].startswith(("GPU-", "MIG-")) and gpu["name"] and ":" in gpu["pci_bus_id"]
        assert gpu["memory_total_bytes"] > 1 << 30
        assert 1 <= gpu["pcie_generation_max"] <= 10 and gpu["pcie_width_max"] in (1, 2, 4, 8, 16, 32)


def test_samples(sampler):
    for static, gpu in zip(sampler.static, sampler.sample(), strict=True):
        assert gpu["index"] == static["index"]
        assert gpu["gpu_utilization_percent"] is None or 0 <= gpu["gpu_utilization_percent"] <= 100
        assert 0 <= gpu["memory_used_bytes"] <= static["memory_total_bytes"]
        assert 0 < gpu["power_watts"] < 5000
        assert 0 < gpu["sm_clock_mhz"] < 10_000 and 0 < gpu["memory_clock_mhz"] < 100_000
        assert 1 <= gpu["pcie_generation"] <= static["pcie_generation_max"]
        assert gpu["pcie_width"] <= static["pcie_width_max"]
        assert 0 < gpu["temperature_celsius"] < 120
        assert isinstance(gpu["throttle_reasons"], list)
        assert gpu["ecc_uncorrected_total"] is None or gpu["ecc_uncorrected_total"] >= 0
        assert gpu["xid_errors"] in (None, [])
    assert len(sampler.notes) == len(set(sampler.notes))


def test_memory_on_the_gpu_is_seen(sampler):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    block = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    index = next(gpu["index"] for gpu in sampler.static if gpu["uuid"] == uuid)
    gpu = next(gpu for gpu in sampler.sample() if gpu["index"] == index)
    assert gpu["memory_used_bytes"] >= block.numel()
