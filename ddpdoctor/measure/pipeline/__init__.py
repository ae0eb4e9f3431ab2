"""Jobs with pipeline stages, from tables of operations: the what-if analysis of Lin et al. (OSDI '25).

In: a table of operations (:mod:`ddpdoctor.trace`). Out: what slow workers and stages cost, as facts. The idea: any dependency
graph can be replayed operation by operation; only there is it needed, since data parallel steps have the dense form of
``graph``.
"""

from .dag import ALONE, Costs, build, in_order, measured, replay
from .facts import straggler_facts, summary_of
from .graph import pipeline_dag
from .stragglers import measure_stragglers
