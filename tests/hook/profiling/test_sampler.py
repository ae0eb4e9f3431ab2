"""When the source line is looked at: mostly while steps are recorded in full, and at no moment of them more than at another."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from ddpdoctor.hook.profiling import sampler as module
from ddpdoctor.hook.recording.recorder import BLOCK_STEPS, Thinning


@pytest.fixture
def sampler(monkeypatch):
    recorder = SimpleNamespace(thinning=Thinning(), step=0, always_full=False, kinds=None)
    found = module.Sampler(SimpleNamespace(recorder=recorder, rank=0))
    found._early_until = 0.0
    monkeypatch.setattr(module.time, "perf_counter_ns", lambda: 0)
    return found, recorder


def wakes(sampler, recorder, step_s: float, count: int = 8000) -> np.ndarray:
    """Times, in steps, at which samples are due in a job of even steps."""
    at, found = 0.0, []
    recorder.thinning.step_ns = 1e9 * step_s
    for _ in range(count):
        recorder.step, recorder.start_perf_ns = int(at), -int(1e9 * step_s * (at % 1))
        pause_s = sampler._pause_s()
        assert pause_s <= 2 * module.MOST_PAUSE_S
        at += pause_s / step_s
        if sampler._until_sample_s <= 0.0:
            found.append(at)
    return np.array(found)


@pytest.mark.parametrize("step_ms", [2.0, 20.0, 60.0, 500.0])
def test_thinned_steps_are_slept_through(sampler, step_ms):
    step_s = step_ms / 1e3
    sampler[1].thinning.every = 16
    thinned = wakes(*sampler, step_s)
    sampler[1].thinning.every = 1
    usual = wakes(*sampler, step_s)
    pauses = np.diff(thinned) * step_s
    assert pauses.min() >= 0.499 * module.LATER_FACTOR * module.MEAN_PERIOD_S
    of_use = thinned // BLOCK_STEPS % 16 == 0
    assert of_use.mean() > 0.9
    per_cycle = of_use.sum() / (thinned[-1] / (16 * BLOCK_STEPS))
    before = (usual // BLOCK_STEPS % 16 == 0).sum() / (usual[-1] / (16 * BLOCK_STEPS))
    assert 0.85 * before < per_cycle < 1.5 * before, "what is seen of the steps in full stays as much"


@pytest.mark.parametrize("step_ms", [20.0, 60.0])
def test_no_moment_is_preferred(sampler, step_ms):
    sampler[1].thinning.every = 8
    at = wakes(*sampler, step_ms / 1e3, 40_000)
    at = at[at // BLOCK_STEPS % 8 == 0]
    for part in (at % 1, at % BLOCK_STEPS / BLOCK_STEPS):
        counts = np.histogram(part, 8, (0, 1))[0]
        assert counts.min() > 0.8 * counts.mean() and counts.max() < 1.2 * counts.mean()


def test_a_step_that_lasts_is_sampled_however_far_off_the_next_full_one_is(sampler, monkeypatch):
    """The status thread reports it; without that thread, the sampler wakes up by itself."""
    found, recorder = sampler
    recorder.thinning.every, recorder.step, recorder.start_perf_ns = 64, 9, 0
    recorder.thinning.step_ns = 20_000_000.0
    taken = []
    monkeypatch.setattr(found, "_gil_wait_ns", lambda wanted_ns: 0)
    monkeypatch.setattr(found, "_take_sample", lambda held_ns: taken.append(recorder.step))
    found.is_told = True
    found._thread.start()
    for step in (9, 9, 10):
        recorder.step = step
        before = time.monotonic()
        while not found._waits_long and time.monotonic() < before + 10:
            time.sleep(0.01)
        assert found._until_sample_s == 0.0, "it waits until a sample is due"
        found.step_lasts(9)
        time.sleep(0.3)
    found.stop(time.monotonic() + 10)
    assert taken == [9, 9], "of the step that no longer lasts there is none"
    found.is_told, found._until_sample_s = False, 0.0
    assert found._pause_s() <= 2 * module.MOST_PAUSE_S


def test_all_steps_in_full_are_looked_at_as_before(sampler):
    sampler[1].thinning.every = 16
    sampler[1].always_full = True
    pauses = np.diff(wakes(*sampler, 0.02)) * 0.02
    assert pauses.mean() == pytest.approx(module.LATER_FACTOR * module.MEAN_PERIOD_S, rel=0.02)
