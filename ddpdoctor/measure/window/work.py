"""What a rank did beside its collectives, as one of the two kinds of recording shows it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ddpdoctor.measure.numerics import EMPTY, Intervals
from ddpdoctor.measure.phases import Gap

from .hostwaits import NO_WAITS, Waits


class Work(msgspec.Struct, frozen=True):
    """The part of a :class:`Window` of these names, on the trace's own clock."""

    sets: Mapping[str, Intervals]
    compute: Intervals
    late_launches: Intervals = EMPTY
    waits: Waits = NO_WAITS
    idle_after: Mapping[str, Intervals] = msgspec.field(default_factory=dict)
    in_gaps: Mapping[Gap, Intervals] = msgspec.field(default_factory=dict)
