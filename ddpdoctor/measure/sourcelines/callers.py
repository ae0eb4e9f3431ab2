"""Who called the user's lines: by stack samples, each of which knows the user's frames above its own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.measure.steplog import RankLog

from .ranking import Frame, frame_of

Path = tuple[CodeLine, ...]
"""The user's lines above one of them, the nearest first."""
Way = tuple[Frame, Path]
"""A line, and the lines above it."""


class _Tuning(msgspec.Struct, frozen=True):
    mostly: float = 0.5
    """A recorded call names its line and not its callers: they are told where more than this part of the samples that know
    that line came the same way."""
    notable: float = 0.25
    """A helper that is called from several places spends time for each of them; another way to a line counts beside the one that
    weighs most if it weighs this part of that: fewer are stray samples, and what counting errors leave of other ranks' ways."""


_TUNING = _Tuning()


def distinct(path: Path, others: Iterable[Path]) -> Path:
    """As many of the callers as tell this path from the ``others``; one at least, where there is any."""
    rest = [other for other in others if other != path]
    for length in range(1, len(path)):
        rest = [other for other in rest if other[:length] == path[:length]]
        if not rest:
            return path[:length]
    return path


def heaviest_of(weights: Mapping[Path, float], others: Iterable[Path] = ()) -> tuple[Path, int]:
    """The way of most weight, so far as it tells it from the rest and from ``others``; how many of the rest are notable, too."""
    if not weights:
        return (), 0
    path = distinct(max(weights, key=lambda way: weights[way]), [*weights, *others])
    by_way: defaultdict[Path, float] = defaultdict(float)
    for way, weight in weights.items():
        by_way[way[: len(path)]] += weight
    least = _TUNING.notable * by_way.pop(path)
    return path, sum(weight >= least for weight in by_way.values())


def paths_in(logs: Sequence[RankLog]) -> dict[Frame, Counter[Path]]:
    """The ways on which samples of these logs came to each line, whether they ended there or deeper."""
    found: dict[Frame, Counter[Path]] = {}
    for log in logs:
        numbers, counts = np.unique(log.samples[:, 1], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            where = log.sample_where.get(number)
            if where is None:
                continue
            found.setdefault(frame_of(where), Counter())[where.callers] += count
            for above, caller in enumerate(where.callers, start=1):
                found.setdefault(frame_of(caller), Counter())[where.callers[above:]] += count
    return found


def usual(frame: Frame, paths: Mapping[Frame, Counter[Path]]) -> tuple[Path, int]:
    """The callers by which most samples came to a line, and how many other ways there are; none where they came by many."""
    ways = paths.get(frame)
    if not ways or max(ways.values()) <= _TUNING.mostly * ways.total():
        return (), 0
    return heaviest_of(ways)


def by_line(ways: Mapping[Way, int]) -> Counter[Frame]:
    """What weighs on each line, by whatever way it was come to."""
    lines: Counter[Frame] = Counter()
    for (frame, _), weight in ways.items():
        lines[frame] += weight
    return lines


def heaviest(frame: Frame, ways: Mapping[Way, int]) -> tuple[Path, int]:
    """The way to a line that weighs most, and how many others there are."""
    return heaviest_of({path: weight for (line, path), weight in ways.items() if line == frame})


def with_callers(places: Sequence[Where], paths: Mapping[Frame, Counter[Path]]) -> list[Where]:
    """The same lines, each with its usual callers."""
    return [where.called_from(*usual(frame_of(where), paths)) for where in places]
