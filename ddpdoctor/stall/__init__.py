"""Jobs that stopped. What a run directory holds of each rank's end, and dumps of torch's flight recorder, become facts of the
family ``hang``: who is at fault, at which line, in which collective the others wait.

    dumps ─► recordings ─► groups ─► who waits for whom ─► the roots ┐
                                └─► the first difference             ├─► HangFacts, where each rank stands
    run directory ─► evidence of each rank ─► deaths, exceptions     ┘

A dump is read without Python's unpickler. Who waits is no culprit: the roots are those that keep others and are kept by none.
What a rank did not record is unknown, and nobody is accused by it but where all others are there.
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
__getattr__ = deferred(__name__, {"evidence_of": "evidence", "of_dumps": "verdict", "of_run": "verdict"})
