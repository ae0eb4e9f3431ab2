"""The line of the user's program at which a loader or a DDP module was made."""

from __future__ import annotations

from typing import Any

from ddpdoctor.measure.places import Where
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.rundir.packages import is_well_known


def users_line(log: RankLog, number: Any) -> Where | None:
    """The line to change, by its number in the log's table; None where only a framework's was seen, as in processes that
    Lightning spawns."""
    line = log.where.get(number) if isinstance(number, int) else None
    return None if line is None or is_well_known(line.file) else line
