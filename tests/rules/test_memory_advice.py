"""A larger batch is advised with the room that there is for it, and not where there is none."""

from __future__ import annotations

import pytest

from ddpdoctor.diagnose.load import load_rules
from ddpdoctor.diagnose.rule_texts import headroom, hours
from ddpdoctor.diagnose.selftest import outcome_of

PACK = load_rules(entry_points=False)
FIRES = {
    "allreduce/communication-bound": {
        "job": {"world_size": 8, "ranks_seen": 8, "backend": "nccl"},
        "steps": {"mean_ms": 150.0, "batch_size": 8.0},
        "communication": {"transfer_ms": 60.0},
        "shared": {"communication": {"ms_per_step": 60.0}},
    },
    "gpu/launch-bound": {
        "job": {"device": "cuda", "compiled": False},
        "steps": {"mean_ms": 40.0, "batch_size": 8.0},
        "gpu": {"busy_share": 0.4, "kernels_per_step": 3000.0, "median_kernel_us": 4.0},
        "shared": {"launch": {"ms_per_step": 20.0}},
    },
    "gpu/low-utilisation": {
        "steps": {"mean_ms": 100.0, "batch_size": 8.0},
        "gpu": {"busy_share": 0.33},
    },
}


def advice(rule: str, memory: dict[str, float], used: float | None = None) -> str | None:
    facts = {**FIRES[rule], "memory": memory}
    if used is not None:
        facts["gpu"] = {**facts.get("gpu", {}), "memory_used_share": used}
    (finding,) = outcome_of(PACK.rules[rule], PACK.common, facts).findings
    return next((fix.why for fix in finding.fixes if fix.title == "A larger batch per rank, now 8"), None)


@pytest.mark.parametrize("rule", FIRES)
def test_a_larger_batch_needs_room(rule):
    room = {"headroom_share": 0.5, "headroom_bytes": 40.0 * 2**30, "batch_times": 2.83}
    told = advice(rule, room, used=0.95)
    assert told is not None, "what NVML sees includes the allocator's cache"
    assert "40 GiB of memory, 50 %, was never used" in told and "at most 2.8 times the batch" in told
    assert advice(rule, room | {"headroom_share": 0.1}, used=0.5) is None
    assert "never used" not in (advice(rule, {}) or "")
    assert advice(rule, {}) is not None and advice(rule, {}, used=0.95) is None


def test_headroom_in_words():
    unknown = dict.fromkeys(("headroom_bytes", "headroom_share", "batch_times"))
    assert headroom(unknown) == ""
    assert headroom(unknown | {"headroom_bytes": 3 * 2**30, "headroom_share": 0.25}) == (
        " 3 GiB of memory a rank, 25 %, was never used."
    )


def test_hours_in_words():
    assert [hours(value) for value in (0.01, 0.03, 0.26, 1.2, 47.0, 100.0)] == [
        "36 seconds",
        "2 minutes",
        "16 minutes",
        "1 hour",
        "47 hours",
        "4 days",
    ]
