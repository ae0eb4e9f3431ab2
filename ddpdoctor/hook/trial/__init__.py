"""A trial: the job with some settings changed, for a limited number of steps, to measure the effect of a change.

Input, from an environment variable: names of settings with their values, and a number of steps. Output: the changed settings, in
constructors (``constructors``), in calls (``calls``) and in the process (``request``), each read back after it was set; loaders
with another number of workers in each of several blocks of steps (``blocks``); and the end of the job between two steps
(``ending``). The outcome of each is in rank.json, under ``trial``.

Only a process started for a trial imports this package. A setting that cannot be changed as requested is reported and left
unchanged.
"""

from __future__ import annotations

import os
from itertools import accumulate

from .. import lifetime
from ..environment import TRIAL
from ..guard import part
from ..patching import Patches, guarded
from ..recording import Session
from . import blocks, calls, constructors, ending, request
from .request import read

NAMES = (*constructors.NAMES, *calls.NAMES, *request.NAMES)
"""Settings that a trial can change in a rank. The launcher sets environment variables."""


def install(patches: Patches) -> None:
    """Apply the requested changes; does nothing if this process belongs to no trial."""
    trial = read(os.environ.get(TRIAL, ""))
    if trial is None:
        return
    for module in (constructors, calls, blocks):
        try:
            module.install(trial, patches)
        except Exception as error:
            part("trial").failed(error)
    losses = ending.watch_losses(patches)

    def begin(session: Session) -> None:
        session.document["trial"] = trial.document
        before = session.stepping.at_every_step
        block_ends = set(accumulate(block["steps"] for block in trial.blocks))

        def at_step(step: int) -> None:
            if before is not None:
                before(step)
            trial.document["steps"] = step
            if step >= trial.steps:
                ending.end(session, trial, losses)
            if step in block_ends:  # what a block did is kept if the job is killed in a later one
                session.writer.document_changed.set()

        session.stepping.at_every_step = guarded(part("trial"), at_step)
        session.stepping.needs_every_step = True
        request.apply_in_rank(trial)
        ending.share_temporary_folder()

    lifetime.at_start.append(begin)
