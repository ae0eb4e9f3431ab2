"""``ddpdoctor try``: the job again with one setting changed, measured against the job as it is.

In come a command, or the findings of a run, and the settings to try; out goes an Answer (``diagnose.tried``): of each variant the measured
step time with its interval, what was expected of it, and a verdict. Each trial is the job itself, unchanged on disk, for a bounded
number of steps; what the hook changes in it is in :mod:`ddpdoctor.hook.trial`. The way::

    settings     what can be changed, and what that may do to results
    proposals    which of it a diagnosis suggests, and what it is expected to bring; what to walk through where nobody knows the best value
    running      one trial: the job for some steps, its step times, what was applied, what the model had become
    processes    its processes, ended with all that they started; scratch: a folder and a working directory of its own
    measuring    trials in turn until the intervals part, or the time is up
    judging      from step times to intervals and verdicts; parity of results
    patches      the lines to edit, as a unified diff
"""

from .measuring import Experiment, Plan
from .patches import patch_of
from .proposals import Proposal, of_settings, proposals, tuning, with_expectation
from .running import Budget, Command, own_command, run_trial
from .settings import parse_setting, setting_of
