"""Diagnoses jobs that hung or failed. Input: a run directory's records of each rank's end, and dumps of torch's flight recorder. Output:
the facts of the family ``hang``: which ranks block the job, at which line, and in which collective the others wait.

::

    dumps ─► recording ─► groups ─► waiting: wait graph and its roots    ┐
      (plainpickle)           └─► first difference of collectives        ├─► verdict: HangFacts, position of each rank (activity)
    run directory ─► evidence ─► causes, conclusions, calls, disagreement ┘
    attempt_ends: the same for each attempt of a restarted run

Dumps are read without Python's unpickler. Roots are ranks that others wait for and that wait for no rank themselves. A rank without a
record is reported only if the records of all others leave no other explanation.
"""

from .dumps import Dumps, StopVerdict, find_dumps
