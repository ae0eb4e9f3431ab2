"""Put all ranks on one clock, and find the same collective on each.

In: logs and traces on their own clocks. Out: copies on the run's common clock, notes (clocks that were set, machines that slept,
processes that were suspended), and :class:`Matched` collectives. Durations come from monotonic clocks. Hosts are aligned by the
collectives that their ranks leave together. An implausible match is refused.
"""

from .log_clocks import align_logs, steps_of_profiler_window, use_monotonic_time, windows_of
from .matching import MatchCoverage, Matched, align_and_match
from .suspensions import exclude_suspended
from .trace_clocks import fit_clock, vote_offsets
