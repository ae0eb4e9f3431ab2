"""The whole run, from the launcher's start to its end: its wall time in parts, and the steps that differ from the others.

In: the ranks' step logs, and when the launcher of each host started and ended. Out: a :class:`RunAccount`, in which the wall time of
each rank is divided into parts that do not overlap and add up to it; and the :class:`StepPattern`\\s: single pauses, work in every n-th
step, a change of the step time at some step, steps that get longer. All steps count, also those recorded with their times only, and
those excluded from the measurement of a typical step.
"""

from .account import Launch, RankAccount, RunAccount, RunPart, run_account
from .attempts import AttemptRecord, attempt_facts, restart_facts, with_first_findings, with_trainings
from .facts import run_facts
