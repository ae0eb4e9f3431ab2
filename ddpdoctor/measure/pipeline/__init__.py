"""Jobs with pipeline stages, from tables of operations: the what-if analysis of Lin et al. (OSDI '25).

In: a table of operations (:mod:`ddpdoctor.trace`). Out: the cost of slow workers and stages, as facts. Here a general dependency
graph is replayed operation by operation; data-parallel steps do not need it, and use the dense form of ``graph``.
"""

from .dag import ALONE, Costs, build, in_order, measured, replay
from .graph import pipeline_dag
from .stragglers import measure_stragglers, straggler_facts, summary_of
