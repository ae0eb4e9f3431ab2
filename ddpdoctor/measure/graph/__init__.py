"""The dependency graph of a run: cycles of work and synchronisations.

In: logs or windows on one clock. Out: a :class:`Graph` of :class:`CycleGroup`, dense arrays over cycles, synchronisations, ranks and
components of work. Every recorded step is in the graph or excluded with a reason. Cycles are independent of each other, because all
ranks are together at the end of a synchronisation. Graphs from logs and from windows have the same form.
:func:`build_graphs` builds those of a run and chooses the primary one: of the step logs, the profiler window, or the devices' own times.
"""

from .cutting import matched_collectives
from .from_logs import OperatorShares, graph_of_logs, operator_shares, python_parts
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
from .lateness import typical_arrival
from .primary import Graphs, Recording, build_graphs
from .segments import ComputeTimeline, dependency_probability
from .standalone_times import issue_time_ns, loader_limit_ns, standalone_data_of_windows
