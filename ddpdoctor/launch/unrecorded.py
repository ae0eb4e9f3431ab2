"""Words for a job of which no rank was recorded: why, and how far its ranks had come."""

from __future__ import annotations

from ddpdoctor.rundir import Note, NoteCode
from ddpdoctor.rundir.door import at_door, read_door
from ddpdoctor.rundir.stops import signal_name

_MOST_NAMED = 8


def standing_at_door(root: str) -> str:
    """Who is there, or was when it ended, and whether it has asked to join, in sentences; "" where nobody is."""
    asked: dict[int, bool] = {}
    for rank, _, path in at_door(root):
        asked[rank] = asked.get(rank, False) or "joining_ns" in read_door(path).about
    told = []
    for has_asked, what in (
        (False, "had not called init_process_group"),
        (True, "waited in init_process_group"),
    ):
        ranks = [rank for rank, has in asked.items() if has is has_asked]
        if ranks:
            more = " ..." if len(ranks) > _MOST_NAMED else ""
            named = ", ".join(map(str, ranks[:_MOST_NAMED]))
            told.append(f"Rank{'s' if len(ranks) > 1 else ''} {named}{more} {what}.")
    return " ".join(told)


def no_rank(program: str, ended_by: int | None, unjoined: str) -> Note:
    """Why, where ``program`` was ended by the signal ``ended_by``, or by itself; ``unjoined`` is what ``standing_at_door`` gave."""
    if ended_by is not None:
        name = signal_name(ended_by)
        told = f"the job was ended by {name} before its first step: no rank was recorded, as none had joined its process group."
        return Note(f"{told} {unjoined}".rstrip(), NoteCode.NO_RANK)
    return Note(
        f"no rank was recorded: {program} ended without any Python process in which "
        "torch.distributed.init_process_group returned, or its ranks did not get the command's environment "
        "(PYTHONPATH, DDPDOCTOR_*), or their Python was started with -I, -E or -S, or is older than 3.9.",
        NoteCode.NO_RANK,
    )
