"""What-if estimates: the graph replayed with something changed.

In: a :class:`~ddpdoctor.measure.graph.Graph` and changes (work, transfers or synchronisations removed). Out: the length of each cycle.
Unchanged, the replay gives the measured times exactly, so that what a change saves is its price.
"""

from .replay import (
    Change,
    baseline,
    common_part,
    idle_after,
    place_removed_work,
    replay,
    replay_all,
    without_sync,
    without_transfer,
    without_waiting,
    without_work,
)
