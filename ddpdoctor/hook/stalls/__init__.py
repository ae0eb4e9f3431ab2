"""A rank that stopped: where it stands, for whoever asks while it hangs, and how it ended.

A thread beside the training thread, the *attendant*, writes down once a second where that one is while a step lasts longer than
a second, and more where the launcher asks because no rank gets on. It needs Python's lock for that; where a thread keeps
the lock, faulthandler's timer writes the stacks. What comes out stands in :mod:`ddpdoctor.rundir.stops`.
"""

from .attendant import Attendant
from .faults import forget_faults

__all__ = ["Attendant", "forget_faults"]
