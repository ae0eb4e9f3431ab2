"""``ddpdoctor try``: compares the job with changed settings to the unchanged job.

Input: a command, or the findings of a run, and the settings to try. Output: a TrialsReport (``diagnose.trials``) with the measured step
time of each variant, its interval, the expected step time, and a verdict. Each trial runs the job, unchanged on disk, for a
bounded number of steps; :mod:`ddpdoctor.hook.trial` applies the settings. Modules::

    settings     settings that can be changed, and their possible effects on results
    proposals    settings that a diagnosis suggests, with the expected step time; value ranges of ``--tune``
    running      one trial: runs the job for some steps; reads its step times, applied settings, parameters and losses
    scratch      the trial's folder, and a copy of the working directory
    measuring    rounds of alternating trials until each variant has a verdict, or the time is up
    judging      intervals and verdicts from step times; parity of results
    patches      the lines to edit, as a unified diff
"""

from .measuring import Experiment, Plan
from .patches import patch_of
from .proposals import Proposal, proposals, proposals_for, tuning, with_expectation
from .running import Budget, Command, own_command, run_trial
from .settings import parse_setting, setting_of
