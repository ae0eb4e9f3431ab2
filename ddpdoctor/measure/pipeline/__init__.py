"""What-if analysis of jobs with pipeline stages, from tables of operations, after Lin et al. (OSDI '25).

In: a table of operations (:mod:`ddpdoctor.trace`). Out: the cost of slow workers and stages, as facts. This package replays a general
dependency graph operation by operation. Data-parallel steps use the dense form of the package ``graph`` instead.
"""

from .dag import ALONE, Costs, build_dag, measured_costs, order_edges, replay
from .graph import pipeline_dag
from .stragglers import measure_stragglers, straggler_facts, summary_of
