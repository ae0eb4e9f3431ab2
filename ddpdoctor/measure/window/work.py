"""What a rank did beside its collectives, as one of the two kinds of recording shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpdoctor.measure.numerics import EMPTY, Intervals
from ddpdoctor.measure.phases import Gap

from .hostwaits import NO_WAITS, Waits


@dataclass(frozen=True)
class Work:
    """The part of a :class:`Window` of these names, on the trace's own clock."""

    sets: Mapping[str, Intervals]
    compute: Intervals
    late_launches: Intervals = EMPTY
    waits: Waits = NO_WAITS
    idle_after: Mapping[str, Intervals] = field(default_factory=dict)
    in_gaps: Mapping[Gap, Intervals] = field(default_factory=dict)
