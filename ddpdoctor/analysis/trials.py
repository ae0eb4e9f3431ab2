"""Adds the results of ``ddpdoctor try`` to the diagnosis of their run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.diagnose.trials import TRIALS_FILE, read_trials
from ddpdoctor.errors import UnusableInput
from ddpdoctor.rundir import RunDirectory


def with_trials(diagnosis: Diagnosis, runs: Sequence[RunDirectory]) -> Diagnosis:
    """The diagnosis with the results in the first of ``runs``; a file that cannot be read becomes a note."""
    for run in runs[:1]:
        file = Path(run.path) / TRIALS_FILE
        try:
            return msgspec.structs.replace(diagnosis, tried=read_trials(file))
        except FileNotFoundError:
            break
        except (UnusableInput, OSError) as error:
            return msgspec.structs.replace(
                diagnosis, notes=[*diagnosis.notes, f"Trials are not shown: {error}"]
            )
    return diagnosis
