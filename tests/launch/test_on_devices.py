"""Ranks that wait on their devices, which looks like computing: what is reported of them, and when their job may be ended."""

from __future__ import annotations

import pytest

from ddpdoctor.launch.rankwatch import WatchedRank

from .test_proof import Watching, busy, doubts
from .test_standstill import a_rank, waiting


def on_its_device(number: int) -> WatchedRank:
    """Its host is in the forward of a later step, in a launch for which the device's queue has no room."""
    rank = a_rank(number, "forward", {"0": [210, -1, 206]})
    rank.meter.cores = 1.0
    return rank


def test_one_that_waits_on_its_device_with_a_core_for_one_that_sleeps() -> None:
    assert on_its_device(0).waits
    assert doubts(on_its_device(0), a_rank(1)) == []


def test_where_all_wait_on_their_devices_one_of_those_may_still_compute() -> None:
    assert doubts(on_its_device(0), waiting(1)) == ["rank 0 may compute on its device"]
    assert doubts(waiting(0), waiting(1)) == []
    in_a_call = on_its_device(0)
    in_a_call.progress["phase"] = "barrier"
    assert doubts(in_a_call, waiting(1)) == []


@pytest.mark.parametrize(("groups", "told"), [({}, True), ({"0": [36, -1, 36]}, False)])
def test_one_that_computes_beside_one_that_sleeps_is_told_where_torch_counts_nothing(
    tmp_path, groups, told
) -> None:
    sleeps, computes = a_rank(0, groups=groups), busy()
    computes.progress["groups"] = groups
    watching = Watching(tmp_path, [sleeps, computes])
    watching.hangs()
    for _ in range(3):
        watching.watch._poll()
    said = watching.warnings()
    assert ("whether the job hangs is not known (torch counts no collectives" in said) is told
    assert said.count("rank 1 (process") == told
    assert watching.watch._stall is None
