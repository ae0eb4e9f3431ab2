"""Limits how many steps of a long run are read: the first, the newest, and blocks of consecutive steps in between.

A decoded step takes about seven times its line's size in memory, so a week of short steps on many ranks does not fit. The
limit is computed from the step numbers, before any line is decoded. It is the same for all ranks, because the graph of a run
needs steps that were read on all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from ddpdoctor.rundir import STEPS_FILE
from ddpdoctor.rundir.compaction import BLOCK_STEPS, STEP_LINE, Ranges, thinned_steps, union
from ddpdoctor.rundir.reader import RankRecord

from .records import MOST_NUMBER

MOST_STEPS = 60_000
"""Steps read per rank."""
MOST_BYTES = 192 << 20
"""Bytes of step lines read per run: 60,000 steps of 400 bytes on 8 ranks; decoded, they take 1.3 GB."""
FEWEST_STEPS = 256
"""Steps read per rank in any case, even with many ranks."""
MOST_SAMPLES = 2_000_000
"""Stack samples read per run; each takes 150 bytes."""
_LEAST_BYTES = 4 << 20
"""Bytes of step lines that may be decoded per rank in any case."""
_LEAST_LINE_BYTES = 60
"""Smallest size of a step line, one of which only the times are on disk."""
_FEWEST_BLOCKS = 16
"""Fewest blocks between the first and the newest steps."""
_LEAST_BLOCK_STEPS = 64
"""Fewest consecutive steps of a block, so that periodic patterns stay visible. Blocks are shorter than :data:`BLOCK_STEPS` if
few steps are read; then the first steps of each block are read."""


class ReadLimit(msgspec.Struct, frozen=True):
    """Limits on the records read of each rank of a run."""

    numbers: Ranges | None = None
    """Numbers of the steps to read; None: all."""
    left_out: int = 0
    """Recorded steps that are not read, including those thinned out on disk."""
    most_bytes: int = MOST_BYTES
    """Bytes of step lines decoded per rank."""
    most_samples: int = MOST_SAMPLES

    def includes(self, number: int) -> bool:
        """Whether the step with this number is read."""
        return self.numbers is None or contains(self.numbers, number)


def read_limit_of(records: Sequence[RankRecord]) -> ReadLimit:
    """The limit for the ranks of one job. Step logs that may be too long are scanned once for their step numbers, without
    decoding."""
    sizes = [record.recorded_bytes for record in records]
    ranks = max(len(records), 1)
    thinned = [numbers for record in records if (numbers := thinned_steps(record.path))]
    whole = ReadLimit(most_samples=MOST_SAMPLES // ranks)
    is_small = not thinned and sum(sizes) <= MOST_BYTES
    if is_small and max(sizes, default=0) <= MOST_STEPS * _LEAST_LINE_BYTES:
        return whole
    present: Ranges = []
    shared: Ranges | None = None
    most = steps = size = 0
    for record in records:
        own, own_size = _step_numbers(record)
        most, steps, size = max(most, size_of(own)), steps + size_of(own), size + own_size
        present, shared = union([present, own]), own if shared is None else _intersection(shared, own)
    if is_small and most <= MOST_STEPS:
        return whole
    affordable = min(MOST_STEPS, MOST_BYTES // ranks * steps // max(size, 1))
    chosen = (
        present
        if most <= affordable
        else _evenly_spread(present, shared or present, max(affordable, FEWEST_STEPS))
    )
    recorded = size_of(union([present, *thinned]))
    return ReadLimit(
        chosen, recorded - size_of(chosen), 4 * max(MOST_BYTES // ranks, _LEAST_BYTES), MOST_SAMPLES // ranks
    )


def _step_numbers(record: RankRecord) -> tuple[Ranges, int]:
    """Step numbers in a rank's log, and the bytes of their lines."""
    numbers: Ranges = []
    first, last, size = 0, -2, 0
    try:
        for line in record.lines(STEPS_FILE):
            if not line.startswith(b'{"step"') or (match := STEP_LINE.match(line)) is None:
                continue
            number = int(match[2])
            size += len(line)
            if number == last + 1:
                last = number
            elif number <= MOST_NUMBER:
                if last >= first:
                    numbers.append((first, last))
                first = last = number
    except OSError:
        pass
    return union([numbers, [(first, last)] if last >= first else []]), size


def size_of(ranges: Ranges) -> int:
    """Count of the numbers in ``ranges``."""
    return sum(last - first + 1 for first, last in ranges)


def contains(ranges: Ranges, number: int) -> bool:
    """Whether ``number`` is in one of the ``ranges``."""
    place = bisect_right(ranges, (number, MOST_NUMBER + 1)) - 1
    return place >= 0 and number <= ranges[place][1]


def _evenly_spread(present: Ranges, shared: Ranges, most: int) -> Ranges:
    """About ``most`` of the numbers: the first eighth, the newest quarter, and evenly spaced blocks between them.

    Blocks consist of steps that all ranks have, because ranks may have thinned out different steps.
    """
    first, newest = most // 8, most // 4
    begin, end = _number_at(present, first), _number_at(present, size_of(present) - newest)
    room = most - first - newest
    # Step numbers may have large gaps: count only blocks that contain steps.
    blocks = sorted(
        {
            place
            for low, high in _intersection(shared, [(begin, end - 1)])
            for place in range(low // BLOCK_STEPS, high // BLOCK_STEPS + 1)
        }
    )
    count = min(len(blocks), max(room // BLOCK_STEPS, _FEWEST_BLOCKS))
    block = max(_LEAST_BLOCK_STEPS, min(BLOCK_STEPS, room // max(count, 1)))
    count = min(count, max(1, room // block))
    chosen = {blocks[round(i * (len(blocks) - 1) / max(count - 1, 1))] for i in range(count)}
    middle = [(place * BLOCK_STEPS, place * BLOCK_STEPS + block - 1) for place in chosen]
    return _intersection(present, union([[(0, begin - 1), (end, MOST_NUMBER)], middle]))


def _number_at(present: Ranges, position: int) -> int:
    """The number at index ``position`` in increasing order; the last number + 1 if there are fewer."""
    before = 0
    for first, last in present:
        if position <= before + last - first:
            return first + position - before
        before += last - first + 1
    return present[-1][1] + 1


def _intersection(one: Ranges, other: Ranges) -> Ranges:
    common: Ranges = []
    i = j = 0
    while i < len(one) and j < len(other):
        first, last = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if first <= last:
            common.append((first, last))
        i, j = (i + 1, j) if one[i][1] < other[j][1] else (i, j + 1)
    return common
