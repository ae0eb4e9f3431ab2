"""Memory of the ranks: leaks, ranks that use more than the others, and headroom for a larger batch.

In: step logs, telemetry of the hosts, and the ranks' records of device memory. Out: the facts of the family ``memory``, and each rank's
memory for the table of ranks. A process's memory is counted without pages of files, which the kernel can reclaim. A series that settles,
fills once or is freed again does not count as growing (``growing``). Memory has no cost in time.
"""

from .facts import Memory, memory_of
from .growing import rise_of
