"""The measurements as tables, and through HolisticTraceAnalysis.

In: logs, windows and traces. Out: data frames, and HTA's results. The idea: beside the road to a diagnosis; what is not
asked for is not imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.deferred import deferred

if TYPE_CHECKING:
    from .flames import flame_graphs
    from .hta import hta_results, hta_trace
    from .tables import COLLECTIVES, EVENTS, STEPS, recorded_tables


_PLACES = {
    "COLLECTIVES": "tables",
    "EVENTS": "tables",
    "STEPS": "tables",
    "flame_graphs": "flames",
    "hta_results": "hta",
    "hta_trace": "hta",
    "recorded_tables": "tables",
}
__getattr__ = deferred(__name__, _PLACES)
