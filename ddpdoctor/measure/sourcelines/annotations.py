"""The user's annotations on a window's training thread (``record_function``), and which of them explains some time."""

from __future__ import annotations

import msgspec
import numpy as np

from ddpdoctor.measure.numerics import Intervals, Ints, covered, total
from ddpdoctor.measure.window import Window, main_lane
from ddpdoctor.trace import classify

_EXPLAINS = 0.5
"""An annotation explains a component when it covers this share of the component's time: more than all others together."""


class Annotations(msgspec.Struct, frozen=True):
    """The annotations on a window's training thread, but for the step marks; times on the run's common clock."""

    names: list[str]
    name: Ints
    """[N] position in ``names``."""
    start: Ints
    end: Ints
    lengths: Ints
    """[len(names)] ns that the annotations of each name take."""

    def explaining(self, time: Intervals) -> str | None:
        """The annotation of the least total length of those that explain ``time``."""
        whole_ns = total(time)
        if not whole_ns or not self.names:
            return None
        inside = np.bincount(self.name, covered(time, self.start, self.end), minlength=len(self.names))
        explaining = np.flatnonzero(inside >= _EXPLAINS * whole_ns)
        if not explaining.size:
            return None
        return self.names[int(explaining[np.argmin(self.lengths[explaining])])]


def annotations_of(window: Window) -> Annotations:
    """Find a window's annotations."""
    trace = window.trace
    marks = trace.name_mask(lambda n: classify.step_number(n) is not None)
    rows = np.flatnonzero(trace.category_mask("user_annotation") & ~marks & (trace.lane == main_lane(trace)))
    ids, name = np.unique(trace.name[rows], return_inverse=True)
    lengths = np.zeros(len(ids), np.int64)
    np.add.at(lengths, name, trace.duration_ns[rows])
    return Annotations(
        names=[trace.names[i] for i in ids.tolist()],
        name=name,
        start=trace.start_ns[rows] + window.shifted_ns,
        end=trace.end_ns[rows] + window.shifted_ns,
        lengths=lengths,
    )
