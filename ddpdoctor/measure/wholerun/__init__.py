"""Accounts for the whole run, from the launcher's start to its end: its wall time in parts, and the steps that differ from the others.

In: the ranks' step logs, and the start and end of each host's launcher. Out: a :class:`RunAccount`, which divides the wall time
(mean over the ranks) into parts that do not overlap and add up to it, and has the :class:`StepPattern`\\s: single pauses, longer
every n-th step, a change of the step time, growing steps. All steps count, including those recorded with times only and those
excluded from the measurement of a typical step.
"""

from .account import Launch, RunAccount, RunPart, run_account
from .facts import run_facts
from .restarts import AttemptRecord, attempt_facts, restart_facts, with_first_findings, with_trainings
