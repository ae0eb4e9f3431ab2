"""Status of a rank that hangs or has ended.

While a step takes more than a second, the status thread writes step, phase and stack once a second, and more on request
of the launcher's hang monitor. It needs the GIL for that. If another thread holds the GIL, faulthandler writes the stack of
the process's first thread at a signal. A rank that has not joined its process group has only a status file (``faults``).
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
