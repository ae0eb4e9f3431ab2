"""Windows without step annotations that begin in different steps, and traces of kernels alone: simulated jobs whose truth is known."""

from __future__ import annotations

import pytest

from tests.exam.__main__ import examined, simulated


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(410012, id="kernels alone, lowered clocks"),
        pytest.param(410097, id="kernels alone, late data"),
        pytest.param(410139, id="sequence numbers, ranks begin two steps apart"),
        pytest.param(410197, id="sequence numbers, one whole step in common"),
    ],
)
def test_who_is_late_is_named_at_its_price_and_nobody_else(seed, tmp_path):
    case, _, traces = simulated(seed, tmp_path)
    assert examined(case, traces).misses == ()
