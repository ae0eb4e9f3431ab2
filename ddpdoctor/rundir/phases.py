"""Phases in which a rank's training thread can be: names, groups, and words for reports."""

from __future__ import annotations

from enum import Enum


class Phase(str, Enum):
    """The phase of the training thread: that of the innermost function on its stack which has one."""

    DATA = "data"
    """Waiting for, or preparing, a batch of a DataLoader."""
    FORWARD = "forward"
    EVALUATION = "evaluation"
    """Forwards without gradients."""
    BACKWARD = "backward"
    """With it the wait for the reduction of the gradients."""
    OPTIMIZER = "optimizer"
    COLLECTIVE = "collective"
    """Called from Python, but for barriers."""
    BARRIER = "barrier"
    WAIT = "wait"
    """For an asynchronous collective."""
    SAVE = "save"
    LOAD = "load"
    RENDEZVOUS = "rendezvous"
    """Making a process group, or asking its store."""
    COMPILE = "compile"
    """``torch.compile`` at work."""
    DEBUGGER = "debugger"
    """A user debugs it with pdb, or it waits for input."""
    OTHER = "other"
    """Code of the user's, or of a library: the frames say which."""


WAITING_PHASES = frozenset((Phase.COLLECTIVE, Phase.BARRIER, Phase.WAIT, Phase.RENDEZVOUS))
"""Phases in which a rank always waits for others."""
LONG_PHASES = frozenset((Phase.EVALUATION, Phase.SAVE, Phase.LOAD, Phase.COMPILE))
"""Phases that take as long as many steps in healthy jobs, without any sign of progress."""
OWN_PHASES = LONG_PHASES | {Phase.DATA}
"""Phases of a rank's own work, in which it does not wait for others even if it has collectives in flight."""
PHASE_WORDS = {
    Phase.DATA: "waiting for data",
    Phase.FORWARD: "forward",
    Phase.EVALUATION: "evaluation",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "optimizer",
    Phase.COLLECTIVE: "a collective",
    Phase.BARRIER: "a barrier",
    Phase.WAIT: "waiting for a collective",
    Phase.SAVE: "writing a checkpoint",
    Phase.LOAD: "reading a checkpoint",
    Phase.RENDEZVOUS: "creating a process group",
    Phase.COMPILE: "torch.compile",
    Phase.DEBUGGER: "a debugger",
    Phase.OTHER: "other code",
}
"""As a table names them."""


def phase_words(name: object) -> str | None:
    """A phase as reports name it; None for none that is known."""
    try:
        return PHASE_WORDS[Phase(name)]
    except ValueError:
        return None


def waits_for_others(phase: object, groups: object) -> bool:
    """Whether a rank in ``phase`` waits for other ranks. ``groups``: by name of the process group, the numbers of its last collective that
    was enqueued, started and completed, -1 for none; not a dictionary if unknown."""
    return phase in WAITING_PHASES or (bool(groups_with_open(groups)) and phase not in OWN_PHASES)


def groups_with_open(groups: object) -> list[str]:
    """Names of the process groups of which a collective is enqueued and not complete."""
    return [name for name, numbers in groups.items() if _is_open(numbers)] if isinstance(groups, dict) else []


def _is_open(numbers: object) -> bool:
    return (
        isinstance(numbers, list)
        and len(numbers) == 3
        and all(isinstance(number, int) for number in numbers)
        and bool(numbers[0] > max(numbers[2], 0))
    )
