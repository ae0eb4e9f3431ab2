"""The dependency graph of a run: cycles of work and synchronisations.

In: logs or windows on one clock. Out: a :class:`Graph` of :class:`CycleGroup`, dense arrays over cycles, synchronisations, ranks and
components of work; every recorded step is in it or has a reason. Ranks are together at the end of a synchronisation, so cycles are
independent of each other. Logs and windows become the same form, which can be measured and replayed.
"""

from .cutting import matched_collectives
from .dependencies import ComputeTimeline, dependency_probability
from .from_logs import graph_of_logs
from .from_windows import graph_of_windows
from .graph import (
    LEFT_OUT,
    CycleGroup,
    Graph,
    RankSteps,
    SegmentClasses,
    Sync,
    all_excluded_steps,
    measured_steps,
    recorded_steps,
)
from .operators import OperatorShares, operator_shares, python_parts
from .primary import Graphs, Recording, build_graphs
from .standalone_times import issue_time_ns, standalone_data_of_windows
