"""Status of a rank that hangs or has ended.

The status thread writes step, phase and stack once a second while a step takes more than a second, and more on request
of the launcher's hang monitor. It needs the GIL for that; if a thread holds the GIL, faulthandler writes the stack of
the process's first thread at a signal. Before a rank has joined its process group it has only a file (``faults``).
:mod:`ddpdoctor.rundir.stops` describes the files.
"""

from .faults import (
    begin_unjoined,
    end_unjoined,
    forget_faults,
    forget_unjoined,
    note_join_started,
    write_unjoined_end,
)
from .rank_status import set_fatal_exception
from .status_thread import StatusThread
