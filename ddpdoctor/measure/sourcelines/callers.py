"""Who called the user's lines: by stack samples, each of which knows the user's frames above its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.measure.steplog import RankLog

from .ranking import Frame, frame_of

Path = tuple[CodeLine, ...]
"""The user's lines above one of them, the nearest first."""
Way = tuple[Frame, Path]
"""A line, and the lines above it."""


@dataclass(frozen=True)
class _Tuning:
    mostly: float = 0.5
    """A recorded call names its line and not its callers: they are told where more than this part of the samples that know
    that line came the same way."""


_TUNING = _Tuning()


def distinct(path: Path, others: Iterable[Path]) -> Path:
    """As many of the callers as tell this path from the ``others``; one at least, where there is any."""
    rest = [other for other in others if other != path]
    for length in range(1, len(path)):
        rest = [other for other in rest if other[:length] == path[:length]]
        if not rest:
            return path[:length]
    return path


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


def usual(frame: Frame, paths: Mapping[Frame, Counter[Path]]) -> Path:
    """The callers by which most samples came to a line; none where they came by many ways."""
    ways = paths.get(frame)
    if not ways:
        return ()
    path, count = ways.most_common(1)[0]
    return distinct(path, ways) if count > _TUNING.mostly * ways.total() else ()


def by_line(ways: Mapping[Way, int]) -> Counter[Frame]:
    """What weighs on each line, by whatever way it was come to."""
    lines: Counter[Frame] = Counter()
    for (frame, _), weight in ways.items():
        lines[frame] += weight
    return lines


def heaviest(frame: Frame, ways: Mapping[Way, int]) -> Path:
    """The way to a line that weighs most, so far as it tells it from the line's others."""
    own = {path: weight for (line, path), weight in ways.items() if line == frame}
    return distinct(max(own, key=lambda path: own[path]), own) if own else ()


def with_callers(places: Sequence[Where], paths: Mapping[Frame, Counter[Path]]) -> list[Where]:
    """The same lines, each with its usual callers."""
    return [where.called_from(usual(frame_of(where), paths)) for where in places]
