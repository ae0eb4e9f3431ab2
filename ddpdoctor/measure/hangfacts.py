"""Facts of jobs that stopped: the family ``hang`` (see :mod:`.facts`). ``ddpdoctor/stall/`` finds them."""

from __future__ import annotations

import msgspec

from .places import CodeLine, Where


class StopFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One reason for which a job stopped, and who it is."""

    ranks: list[int] | None = None
    """Those at fault, never those that wait; null where nobody can be told from the others."""
    waiting_ranks: list[int] = []
    """Those that wait for them, as far as seen."""
    group: str | None = None
    """Process group of the collective at which they wait."""
    collective: str | None = None
    """``all_reduce``, ``barrier``, ... as torch's flight recorder names it."""
    sequence: int | None = None
    """Its number in the group."""
    tensors: str | None = None
    """Its input, sizes and type: ``2048x5120 BFloat16``."""
    unlike: str | None = None
    """What the ranks at fault called instead, under the same number."""
    kind: str | None = None
    """What kind of difference, death or error it is, in one word."""
    doing: str | None = None
    """What the ranks at fault do, in a word: ``lock``, ``storage``, ``loop``, ... Null where nothing shows it."""
    says: str | None = None
    """The same as a part of a sentence, for one rank: ``waits for a lock``."""
    message: str | None = None
    """The exception, or the device's error."""
    since: str | None = None
    """When the first of those that wait came to that collective, by its host's clock."""
    since_s: float | None = None
    """For how long they stood, when it was last looked at."""
    step: int | None = None
    """In which step the first of them stands."""
    where: list[Where] = []
    """The line at which each of them stands, or was last seen, with its callers."""
    waits_at: list[Where] = []
    """The line at which the others wait."""
    evidence: list[str] = []
    """What was seen, a sentence each."""


class HangFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A job that hangs or hung, a rank that died or raised."""

    looked: bool | None = None
    """Whether there is anything that would show it: a recorded run, or flight recorder dumps."""
    state: str | None = None
    """"hangs" (it did when it was looked at), "failed" (it ended, not in order); null where it did neither."""
    lasts: bool | None = None
    """Whether it still did when it was last looked at, so that its processes can be asked; null where nothing tells."""
    since_s: float | None = None
    """Time without progress, when it was last looked at."""
    step: int | None = None
    """The last step that any rank was in."""
    exit_code: int | None = None
    """The job's, where it is not 0."""
    not_reached: StopFacts | None = None
    """A rank did not come to a collective at which others wait."""
    different: StopFacts | None = None
    """Ranks called different collectives."""
    uneven: StopFacts | None = None
    """A rank had no more batches, and others did."""
    unused_parameter: StopFacts | None = None
    """A rank's backward pass left out parameters that others reduce."""
    died: StopFacts | None = None
    """A rank's process ended without an exception of Python's: a signal, or an exit code."""
    raised: StopFacts | None = None
    """A rank raised an exception that nobody caught."""
    device: StopFacts | None = None
    """A rank's device failed."""
    worker: StopFacts | None = None
    """A worker process of a rank's DataLoader was killed."""
    rendezvous: StopFacts | None = None
    """All ranks that are there wait for a process group to be made."""
    together: StopFacts | None = None
    """All ranks stand in the same collective: the link, or a device of theirs."""
    unexplained: StopFacts | None = None
    """It stopped, and nothing shows at whom."""
    effects: list[str] = []
    """What followed from that elsewhere, a sentence each."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank was last seen."""

    rank: int
    host: str | None = None
    guilty: bool = False
    """Whether a finding names it."""
    step: int | None = None
    """The step that it is in."""
    phase: str | None = None
    """In which part of it, in words."""
    collective: str | None = None
    """The last one that it issued, with group and number."""
    state: str | None = None
    """What it does there, as far as that is seen, or how it ended."""
    since_s: float | None = None
    """For how long, when it was last looked at."""
    where: Where | None = None
    """The line of the user's program."""
    stack: list[CodeLine] = []
    """All that its training thread was in, the innermost first."""
