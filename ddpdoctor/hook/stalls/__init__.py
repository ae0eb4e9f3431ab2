"""A rank that stopped: where it stands, for whoever asks while it hangs, and how it ended.

A thread beside the training thread, the *attendant*, writes down once a second where that one is while a step lasts longer than
a second, and more where the launcher asks because no rank gets on. It needs Python's lock for that; where a thread keeps
the lock, faulthandler writes the stack of its first thread when a signal asks for it. Before a rank has joined its process group
it only says that it is there (``door``). What comes out stands in :mod:`ddpdoctor.rundir.stops`.
"""

from .faults import forget_faults
from .rank_status import set_fatal_exception
from .status_thread import StatusThread
from .unjoined import begin_unjoined, end_unjoined, forget_unjoined, note_join_started, write_unjoined_end
