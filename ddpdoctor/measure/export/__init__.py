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


__getattr__ = deferred(
    __name__,
    {
        "flames": "flame_graphs",
        "hta": "hta_results hta_trace",
        "tables": "COLLECTIVES EVENTS STEPS recorded_tables",
    },
)
