"""Jobs that stopped. What a run directory holds of each rank's end, and dumps of torch's flight recorder, become facts of the
family ``hang``: who is at fault, at which line, in which collective the others wait.

::

    dumps ─► recording ─► groups ─► waiting: who waits for whom, the roots ┐
      (plainpickle)           └─► mismatches: the first difference         ├─► verdict: HangFacts, where each rank stands (activity)
    run directory ─► evidence, frames ─► causes, ends, calls, disagreement ┘     (answer: what the verdict is made of)

A dump is read without Python's unpickler. A rank that waits is not at fault: the roots are those that keep others waiting and are
kept by none. What a rank did not record is unknown, and no rank is blamed for it unless all others are accounted for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.deferred import deferred

from .answer import Verdict
from .dumps import Dumps, find_dumps

if TYPE_CHECKING:
    from .evidence import evidence_of
    from .verdict import of_dumps, of_run


# Traces alone, of which nothing says that it stopped, need none of these.
__getattr__ = deferred(__name__, {"evidence": "evidence_of", "verdict": "of_dumps of_run"})
