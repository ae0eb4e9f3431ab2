"""What the ranks' memory holds, who holds more than the others, what grows without end, and what is left for a larger batch.

In: step logs, telemetry of the hosts, and what ranks recorded of their devices. Out: the facts of the family ``memory``, and what
the table of ranks shows of each. The idea: a process's pages are counted without those of files, which the kernel takes back;
a series that settles, fills once or gives back is none that grows (:mod:`.growing`); no step is priced here.
"""

from .growing import Rise, rise_of
from .memory import Memory, memory_of
