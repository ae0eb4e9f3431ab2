"""Collectives matched by their order, against the truth of generated jobs; and refused where nothing fits."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from ddpdoctor.measure.align import align_and_match

from .jobs import SPREAD, Job, Kind, recorded, told, without_groups

CLOCKS = {"offsets_ms": (0.0, 3.0, -8.0, 2500.0), "drifts_ppm": (0.0, 50.0, -80.0, 10.0)}
CUT = (0, 7, -3, 11)
GROUPS = tuple(
    Kind("allreduce", 1.0 + place, group=group, members=members)
    for place in range(3)
    for group, members in (("even", (0, 2)), ("odd", (1, 3)), ("0", ()))
)
QUICK = tuple(Kind("allreduce", 0.05, work_ms=0.3 + 0.01 * (place % 7)) for place in range(30))
EVEN = Job(
    kinds=(Kind("allreduce", 2.0), Kind("allreduce", 3.0)),
    steps=20,
    cut=(0, 22, -18, 26),
    lateness_ms=0.02,
    **CLOCKS,
)
"""Steps as long as each other, beginning up to 13 apart: seven or fewer are in all windows, and each fits beside its neighbours'."""
JOBS = {
    "spread ends": Job(),
    "lost events": Job(lost=0.05, steps=40),
    "cut windows": Job(cut=CUT),
    "cut and lost": Job(cut=CUT, lost=0.03, steps=30),
    "no step marks": Job(cut=CUT, lost=0.02, steps=30, marked=False),
    "a rank that leaves early": Job(leaves={2: 31}),
    "sixty-four ranks": Job(ranks=64, lost=0.01),
    "clocks": Job(cut=CUT, lost=0.02, steps=30, **CLOCKS),
    "clocks without step marks": Job(cut=CUT, lost=0.02, steps=30, marked=False, **CLOCKS),
    "groups": Job(kinds=GROUPS, lost=0.02, cut=CUT),
    "groups on clocks": Job(kinds=GROUPS, lost=0.02, **CLOCKS),
    "quick ones": Job(kinds=QUICK, lost=0.02, cut=CUT),
    "quick ones on clocks": Job(kinds=QUICK, lost=0.02, **CLOCKS),
    "clocks, and windows that begin in different steps": EVEN,
    "numbers": Job(lost=0.05, numbered=True, cut=CUT, **CLOCKS),
    "numbers without step marks": Job(lost=0.05, numbered=True, cut=CUT, marked=False, **CLOCKS),
    "numbers that begin anew": Job(lost=0.05, numbered=True, renumbered=20, cut=CUT),
    "without metadata": without_groups(Job(lost=0.02, cut=CUT)),
}


def matched(job):
    ranks = recorded(job)
    return ranks, align_and_match([of.window for of in ranks])[1]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", JOBS)
def test_no_two_are_taken_for_one_and_hardly_any_is_missed(name, seed):
    ranks, found = matched(replace(JOBS[name], spread=0.25, seed=seed))
    wrong, missed, all_of_them = told(ranks, found)
    assert found.refused is None and wrong == 0
    assert missed <= 0.005 * all_of_them


TWO_STAGES = (
    Kind("allreduce", 1.0, "", members=(0, 1)),
    Kind("allreduce", 3.0, "", members=(2, 3)),
    Kind("allreduce", 0.8, "", work_ms=0.1, stream=24),
) * 4
"""Each host reduces on one stream, the second one over a slow link, and all ranks on the other."""
MESH = (
    Kind("allreduce", 0.3, "", members=(0, 1)),
    Kind("allreduce", 0.3, "", members=(2, 3)),
) * 6 + (
    Kind("allreduce", 0.8, "", members=(0, 2), stream=24),
    Kind("allreduce", 0.8, "", members=(1, 3), stream=24),
)
"""Tensor parallel pairs, and data parallelism across them."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kinds", [TWO_STAGES, MESH], ids=["two stages", "mesh"])
def test_clocks_follow_from_the_stream_whose_group_two_ranks_share(kinds, seed):
    """The ranks' other stream has as many collectives or more, which end at similar times."""
    offsets_ms = (0.0, 3.0, -8.0, 5.0)
    ranks = recorded(
        Job(kinds=kinds, steps=20, lateness_ms=0.02, scatter_ms=0.001, seed=seed, offsets_ms=offsets_ms)
    )
    windows = align_and_match([of.window for of in ranks])[0]
    moved_ms = [(window.span[0] - of.window.span[0]) / 1e6 for window, of in zip(windows, ranks, strict=True)]
    assert moved_ms == pytest.approx([-offset for offset in offsets_ms], abs=0.05)


def test_what_is_missing_has_a_reason():
    _, found = matched(Job(spread=0.25))
    assert found.coverage.complete == len(found.rows) == 60 and found.coverage.incomplete == 0
    assert matched(Job(spread=0.25, leaves={2: 31}))[1].coverage.rank_stopped == 60 - 31
    cut = matched(Job(spread=0.25, cut=(0, 7, -3, 11)))[1].coverage
    assert (cut.complete, cut.outside_window, cut.event_missing, cut.rank_stopped) == (
        60 - 11 - 3,
        11 + 3,
        0,
        0,
    )
    lost = matched(Job(spread=0.25, lost=0.03, steps=30))[1].coverage
    assert lost.event_missing > 0 and lost.outside_window <= 1 and lost.rank_stopped == 0


SLICED = Job(
    ranks=2,
    kinds=(Kind("allreduce", 1.0, work_ms=3.0), Kind("allreduce", 1.0, work_ms=3.0)),
    scatter_ms=4.0,
)
"""Two processes on one GPU take turns of milliseconds: each sees the end of a collective in its own."""


@pytest.mark.parametrize("marked", [True, False])
def test_numbers_prove_what_distant_ends_do_not(marked):
    assert matched(replace(SLICED, marked=marked))[1].refused
    ranks, found = matched(replace(SLICED, marked=marked, numbered=True))
    assert found.refused is None and told(ranks, found)[:2] == (0, 0)
    other = replace(SLICED, marked=marked, numbered=True, scatter_ms=0.015)
    slower = tuple(replace(kind, work_ms=4.2) for kind in other.kinds)
    assert of_two_jobs(other, replace(other, kinds=slower, seed=50)).refused


def test_ends_that_are_always_later_on_one_rank_make_waits_uncertain():
    """Within a host no clock is corrected: of two processes on a GPU, one may see each end 2 ms after the other."""
    first, second = (of.window for of in recorded(replace(SLICED, numbered=True, scatter_ms=0.015)))
    later = msgspec.structs.replace(second.collectives, end=second.collectives.end + 2_000_000)
    found = align_and_match([first, msgspec.structs.replace(second, collectives=later)])[1]
    assert found.refused is None and 1.9e6 < found.error_ns < 2.1e6


def of_two_jobs(one, other, offset_ms=0.0):
    """Rank 0 of the one beside rank 1 of the other, whose clock is ahead by so much."""
    first, second = recorded(one)[0].window, recorded(other)[1].window.shifted(int(offset_ms * 1e6))
    return align_and_match([first, second])[1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kinds", [SPREAD, QUICK], ids=["long ones", "quick ones"])
def test_different_jobs_are_refused(seed, kinds):
    """One of the others does the same with more work between."""
    slower = tuple(replace(kind, work_ms=1.3 * kind.work_ms + 1.0) for kind in kinds)
    job = Job(kinds=kinds, steps=20, seed=seed)
    assert of_two_jobs(job, replace(job, kinds=slower, seed=seed + 50)).refused
    assert of_two_jobs(job, replace(job, seed=seed + 50)).refused, "the same script, run twice"
    numbered = replace(job, numbered=True)
    assert of_two_jobs(numbered, replace(numbered, kinds=slower, seed=seed + 50)).refused


def test_windows_that_do_not_overlap_are_refused():
    job = Job(steps=20)
    assert "do not overlap" in of_two_jobs(job, job, offset_ms=60_000).refused
