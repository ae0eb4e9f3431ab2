"""What-if estimates: replay the graph with changes.

In: a :class:`~ddpdoctor.measure.graph.Graph` and changes (work, transfers or synchronisations removed). Out: the length of each cycle.
Without changes, the replay gives the measured times exactly, so the time that a change saves is the cost.
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
