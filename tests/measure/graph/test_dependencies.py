"""Which collectives hold up the computation, though their kind does not say so."""

from __future__ import annotations

import numpy as np
import pytest

from ddpdoctor.measure.graph import CycleGroup, Sync, dependent
from ddpdoctor.measure.replay import length_ns, transmissions_of
from ddpdoctor.measure.taxonomy import COMPONENTS

MS = 1e6
ARRIVAL, END = 10 * MS, 14 * MS


def of_one(*computes_ms):
    """Whether a rank with these kernels (begin and end, ms) waits for a collective from 10 to 14 ms."""
    table = np.array(computes_ms, float).reshape(-1, 2) * MS
    return bool(
        dependent([(table[:, 0], table[:, 1])], np.full((3, 1, 1), ARRIVAL), np.full((3, 1, 1), END))[0, 0]
    )


@pytest.mark.parametrize(
    ("computes_ms", "waits"),
    [
        ([(0, 10), (14.005, 20)], True),  # stands still all the time, goes on at once
        ([(0, 12), (14.01, 20)], True),  # computes beside it for a while, then waits for it
        ([(0, 10), (13.9995, 20)], True),  # clocks are read to the microsecond
        ([(0, 20)], False),  # computes on
        ([(0, 10), (16, 20)], False),  # goes on later, for another reason
        ([(0, 13.98), (14.01, 20)], False),  # a gap between two kernels that were launched slowly
        ([(0, 10)], False),  # nothing comes after it
        ([], False),
    ],
)
def test_a_computation_that_goes_on_at_the_end_of_a_collective_waited_for_it(computes_ms, waits):
    assert of_one(*computes_ms) is waits


def test_short_collectives_between_kernels_are_waited_for():
    """Tensor parallelism: 60 us of transfer in which nothing else runs."""
    arrival, end = np.array([[[1.0]]]) * MS, np.array([[[1.06]]]) * MS
    kernels = (np.array([0.0, 1.063]) * MS, np.array([1.0, 2.0]) * MS)
    assert dependent([kernels], arrival, end)[0, 0]


def test_ranks_are_judged_alone_and_by_most_of_their_cycles():
    arrival = np.array([[[10.0, 10.0, np.nan]], [[30.0, 30.0, np.nan]], [[50.0, 50.0, np.nan]]]) * MS
    end = arrival + 4 * MS
    waits = (np.array([0, 14.01, 34.01, 54.5]) * MS, np.array([10.0, 30.0, 50.0, 60.0]) * MS)
    computes_on = (np.array([0.0]), np.array([60.0]) * MS)
    assert dependent([waits, computes_on, waits], arrival, end).tolist() == [[True, False, False]]


@pytest.mark.parametrize("seen", [True, False])
def test_what_is_waited_for_moves_the_computation(seen):
    """Two parts of sharded parameters, a computation of 10 ms after each: a transfer that is 3 ms shorter saves 3 ms where
    the computation waits for it, nothing where it does not."""
    syncs = (Sync("gradients", "allgather", (0, 1)), Sync("gradients", "allgather", (0, 1)))
    both = np.ones((1, 1, 2))
    arrival = np.concatenate([both * 10, both * 24], axis=1) * MS
    end = np.concatenate([both * 14, both * 28], axis=1) * MS
    group = CycleGroup(
        *(syncs, np.array([1]), np.zeros((1, 2)), arrival, end, np.zeros((1, 2, 2, len(COMPONENTS)))),
        np.full((1, 2), 1e6),
        on_device=True,
        dependent=np.full((2, 2), seen),
    )
    parts = transmissions_of(group)
    assert length_ns(group, parts)[0] == 28 * MS
    shorter = [
        part if k else type(part)(**{**vars(part), "transfer": part.transfer - 3 * MS})
        for k, part in enumerate(parts)
    ]
    assert length_ns(group, shorter)[0] == (25 if seen else 28) * MS
