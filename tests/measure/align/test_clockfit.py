"""One clock for several hosts: the offset and drift of paired ends, against the truth."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.measure.align import fit_clock, vote_offsets

EPOCH_NS = 1_759_308_646_000_000_000
BOUND_NS = 50_000


def ends(count=300, seed=0, step_ns=14_000_000):
    """Collectives of steps of 14 ms: five a step, unevenly spaced."""
    random = np.random.default_rng(seed)
    places = np.array([0.30, 0.50, 0.66, 0.85, 0.97])
    times = (np.arange(count // 5)[:, None] + places) * step_ns
    return EPOCH_NS + (times.ravel() + random.normal(0, 100_000, count)).astype(np.int64)


def seen(true, offset_ns=0, drift_ppm=0.0, scatter_ns=15_000, seed=1):
    """What another host's clock says, each end woken a little late."""
    random = np.random.default_rng(seed)
    late = np.abs(random.normal(0, scatter_ns, len(true)))
    local = true + offset_ns + (true - EPOCH_NS) * drift_ppm * 1e-6 + late
    return local.astype(np.int64)


def error_ns(fit, true, offset_ns, drift_ppm):
    """Largest error of the correction over the window."""
    local = (true + offset_ns + (true - EPOCH_NS) * drift_ppm * 1e-6).astype(np.int64)
    return np.abs(local + fit.correction(local) - true).max()


@pytest.mark.parametrize("offset_ns", [0, 500_000, -3_700_000_000, 86_400_000_000_000])
@pytest.mark.parametrize("drift_ppm", [0.0, 100.0, -100.0])
@pytest.mark.parametrize("seed", range(3))
def test_offset_and_drift_are_corrected_to_within_50_us(offset_ns, drift_ppm, seed):
    true = ends(seed=seed)
    fit = fit_clock(seen(true, seed=seed + 50), seen(true, offset_ns, drift_ppm, seed=seed + 90))
    assert error_ns(fit, true, offset_ns, drift_ppm) < BOUND_NS
    assert fit.error_ns < BOUND_NS and fit.pairs == len(true)


def test_outliers_do_not_move_it():
    true = ends()
    other = seen(true, 2_000_000_000, 100.0)
    other[::7] += 40_000_000
    other[1::13] -= 9_000_000
    assert error_ns(fit_clock(seen(true), other), true, 2_000_000_000, 100.0) < BOUND_NS


def test_a_run_of_hours_is_followed():
    true = np.arange(2_000) * 5_000_000_000 + EPOCH_NS
    fit = fit_clock(seen(true), seen(true, -40_000_000, 100.0))
    assert error_ns(fit, true, -40_000_000, 100.0) < BOUND_NS
    assert fit.drift * 1e6 == pytest.approx(100.0, abs=0.01)


def test_few_or_no_pairs():
    true = ends(10)[:3]
    fit = fit_clock(true, true + 700_000)
    assert fit.drift == 0.0 and error_ns(fit, true, 700_000, 0) < 1_000
    assert fit_clock(true[:0], true[:0]).pairs == 0


@pytest.mark.parametrize("offset_ns", [0, 500_000, -2_000_000, 2_500_000_000])
@pytest.mark.parametrize("lost", [0, 1, 7])
def test_votes_find_the_offset_of_windows_that_do_not_begin_together(offset_ns, lost):
    true, labels = ends(60), ["a", "b", "c", "d", "e"] * 12
    found = vote_offsets(seen(true), labels, seen(true, offset_ns, seed=3)[lost:], labels[lost:])
    assert min(abs(offset - offset_ns) for offset in found) < BOUND_NS


def test_votes_need_something_alike():
    true = ends(10)
    assert vote_offsets(true, ["a"] * 10, true, ["b"] * 10) == []
    assert vote_offsets(true[:0], [], true, ["a"] * 10) == []


def test_in_a_short_window_the_scatter_of_the_ends_is_not_taken_for_a_drift():
    errors = []
    for seed in range(40):
        true = ends(count=15, seed=seed)
        fit = fit_clock(seen(true, seed=seed + 50), seen(true, 500_000, 20.0, seed=seed + 90))
        errors.append(error_ns(fit, true, 500_000, 20.0))
    assert np.median(errors) < 5_000, "6,600 where the slope is believed"
