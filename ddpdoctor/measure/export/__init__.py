"""Export measurements as tables, and through HolisticTraceAnalysis (HTA).

In: logs, windows and traces. Out: data frames, and HTA's results. Not part of a diagnosis; each module is imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.deferred import deferred

if TYPE_CHECKING:
    from .hta import hta_results, hta_trace
    from .tables import COLLECTIVES, EVENTS, STEPS, recorded_tables


__getattr__ = deferred(
    __name__, {"hta": "hta_results hta_trace", "tables": "COLLECTIVES EVENTS STEPS recorded_tables"}
)
