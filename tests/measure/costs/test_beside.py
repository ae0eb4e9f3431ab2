"""What of a wait for data workers can take over: as much as there are cores for, and all of it that needs none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddpdoctor.measure.costs import Context
from ddpdoctor.measure.metrics import Cores, asleep_shares
from ddpdoctor.measure.steplog import Event
from ddpdoctor.measure.taxonomy import Component

BUSY = Cores(job=0.5, idle=0.1, ranks=2, computing=2.0)


def beside_ms(
    cores: Cores | None, asleep: dict[int, float], positions: list[int] | None = None
) -> float | None:
    graph = SimpleNamespace(mean_cycle_ns=100e6, ranks=[4, 7])
    return Context(graph, None, None, cores=cores, asleep=asleep)._overlappable_ms(
        60e6, (Component.DATA,), positions
    )


@pytest.mark.parametrize(
    ("asleep", "positions", "saved"),
    [
        ({}, None, 100 - 500 / 6),  # all of it may be computed, and cores are few
        ({4: 0.9, 7: 0.8}, None, 48.0),
        ({4: 0.9}, None, 100 - 500 / 6),  # of one rank nothing is known
        ({4: 0.9, 7: 0.1}, [0], 54.0),
    ],
)
def test_what_nothing_computes_in_needs_no_core(asleep, positions, saved):
    assert beside_ms(BUSY, asleep, positions) == pytest.approx(saved)


def test_idle_cores_take_it_all_and_an_unknown_machine_says_nothing():
    assert beside_ms(Cores(1.0, 15.0, 2, 2.0), {}) == pytest.approx(60.0)
    assert beside_ms(None, {4: 1.0, 7: 1.0}) is None


def log(rank: int, *events: Event) -> SimpleNamespace:
    steps = [SimpleNamespace(events=events)] * 20
    return SimpleNamespace(rank=rank, steps=steps, is_of_training=lambda event: True)


def batch(asleep_ns: int, **more: object) -> Event:
    return Event(kind="data", start_ns=0, duration_ns=1000, asleep_ns=asleep_ns, **more)


def test_ranks_of_which_nothing_was_recorded_are_left_out():
    known = log(0, batch(900), batch(-1), batch(0, exhausted=True))
    assert asleep_shares([known, log(1, batch(-1)), log(2)]) == {0: pytest.approx(0.9)}
