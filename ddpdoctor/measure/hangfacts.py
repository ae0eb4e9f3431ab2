"""Facts of jobs that stopped: the family ``hang`` (see :mod:`.facts`). ``ddpdoctor/stall/`` finds them."""

from __future__ import annotations

import msgspec

from .places import CodeLine, Where


class StopFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One reason for which a job stopped, and the ranks at fault."""

    ranks: list[int] | None = None
    """Ranks that the finding names, never those that only wait; null if they cannot be distinguished from the others."""
    arrival_unknown: bool | None = None
    """Whether others may wait for ``ranks``, but no dump shows that these did not arrive, because they left none; null if not."""
    waiting_ranks: list[int] = []
    """Ranks that wait, in ``collective`` if one is named."""
    group: str | None = None
    """Process group of that collective (torch's description, and the group's name in parentheses)."""
    collective: str | None = None
    """Collective in which they wait: ``all_reduce``, ``barrier``, ..., as torch's flight recorder names it."""
    sequence: int | None = None
    """Number of the collective in its group."""
    tensors: str | None = None
    """Input of the collective, sizes and type: ``2048x5120 BFloat16``."""
    unlike: str | None = None
    """What the ranks at fault called instead, under the same number."""
    kind: str | None = None
    """Kind of difference, death or error, in one word."""
    fault: str | None = None
    """What failed in an error of a device: "program" (a kernel: a failed assertion, an invalid access) or "hardware" (the GPU, its links
    or driver); null if unknown, or for other reasons."""
    doing: str | None = None
    """What the ranks at fault do, in a word: ``lock``, ``storage``, ``loop``, ...; ``oversized`` if a rank asked for more memory than its
    device has. Null if nothing shows it."""
    says: str | None = None
    """What a rank at fault does, as part of a sentence: ``waits for a lock``."""
    message: str | None = None
    """Error message: the exception, or the device's error."""
    since: str | None = None
    """When the first waiting rank reached the collective, by its host's clock."""
    since_s: float | None = None
    """Time without progress, when last checked."""
    step: int | None = None
    """Step in which the first of them stopped."""
    where: list[Where] = []
    """Line at which each of them is, or was last seen, with its callers."""
    waits_at: list[Where] = []
    """Line at which the other ranks wait."""
    evidence: list[str] = []
    """Observations, a sentence each."""


class HangFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A job that hangs or hung, a rank that died or raised."""

    looked: bool | None = None
    """Whether the input can show a hang: a recorded run, or flight recorder dumps."""
    only_dumps: bool | None = None
    """Whether the input has flight recorder dumps alone, which show collectives, and not how a rank ended; null if not."""
    undecided: str | None = None
    """Why flight recorder dumps do not show for which rank others wait, as part of a sentence; null if they do, or if no rank waits."""
    state: str | None = None
    """"hangs" (when last checked) or "failed" (it ended, not in order); null if neither."""
    lasts: bool | None = None
    """Whether it still hung when last checked, so that its processes can be inspected; null if unknown."""
    until: str | None = None
    """What ended a job that hung, as words that follow "until": "SIGTERM ended it". Null if it still hangs, or if that is unknown."""
    since_s: float | None = None
    """Time without progress, when last checked."""
    step: int | None = None
    """The last step that any rank was in."""
    exit_code: int | None = None
    """Exit code of the job, if not 0."""
    hidden: bool | None = None
    """Whether the job failed although its exit code is 0; null if it did not."""
    not_reached: StopFacts | None = None
    """A rank did not reach a collective at which others wait."""
    different: StopFacts | None = None
    """Ranks called different collectives."""
    uneven: StopFacts | None = None
    """A rank ran out of batches, and others did not."""
    unused_parameter: StopFacts | None = None
    """A rank's backward pass skipped parameters that others reduce."""
    died: StopFacts | None = None
    """A rank's process ended without a Python exception: a signal, or an exit code."""
    raised: StopFacts | None = None
    """A rank raised an uncaught exception."""
    device: StopFacts | None = None
    """A rank's device failed."""
    worker: StopFacts | None = None
    """A worker process of a rank's DataLoader was killed."""
    rendezvous: StopFacts | None = None
    """All ranks present wait for a process group to be created."""
    together: StopFacts | None = None
    """All ranks are stuck in the same collective: the link, or one of their devices."""
    unexplained: StopFacts | None = None
    """It stopped, and nothing shows which rank is at fault."""
    effects: list[str] = []
    """Effects on other ranks, a sentence each."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank was last seen."""

    rank: int
    host: str | None = None
    guilty: bool = False
    """Whether a finding names this rank."""
    step: int | None = None
    """Its current step."""
    phase: str | None = None
    """The phase of the step, in words."""
    collective: str | None = None
    """The collective in which it waits, else the first one that it issued and that is not finished, else the last one, with group and
    number."""
    state: str | None = None
    """What it does there, if known, or how it ended."""
    since_s: float | None = None
    """For how long, when last checked."""
    where: Where | None = None
    """The line of the user's program."""
    stack: list[CodeLine] = []
    """Stack of its training thread, the innermost line first."""
