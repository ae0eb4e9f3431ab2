"""The whole run, from the launcher's start to its end: where its wall time went, and which steps were unlike the others.

In: the ranks' step logs, and when the launcher of each host started and ended. Out: a :class:`RunAccount`, in which the wall time of
each rank is divided into parts that do not overlap and add up to it; and the :class:`StepPattern`\\ s: single pauses, work in every
n-th step, steps that are slower from some step on, steps that get longer. Steps count with the time that they took, also those that
were recorded with their times only, and those that are excluded from the measurement of a typical step.
"""

from .account import Launch, RankAccount, RunAccount, RunPart, run_account
from .facts import run_facts
