"""How often gradients are reduced: the log of the run and the window count differently."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from ddpdoctor.measure.metrics import bucket_facts
from tests.measure.made import cycles_of, graph_of, reductions, work_array


def of_buckets(count):
    return graph_of(cycles_of(reductions(2, count), work_array(4, count, 2, backward=1.0)))


@pytest.mark.parametrize(("buckets", "passes"), [(4, 1), (1, 1), (6, 2)])
def test_a_window_shows_buckets_and_a_log_backward_passes(buckets, passes, windows):
    logs = [SimpleNamespace(record=SimpleNamespace(info={}), steps=[])] * 2
    window = replace(of_buckets(buckets), source="trace")
    assert bucket_facts(window, of_buckets(passes), window, logs, windows).syncs_per_step == passes
    assert bucket_facts(window, None, window, [], windows).syncs_per_step is None, "the windows show none"
