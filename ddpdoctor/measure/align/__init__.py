"""All ranks on one clock, and the same collective found on each.

In: logs and windows by their own clocks. Out: the same on the run's common clock, logs as new ones, with what was noticed
on the way (clocks that were set, machines that slept, processes that were stopped), and :class:`Matched` collectives. The
idea: durations come from monotonic clocks, hosts are tied by the collectives that their ranks leave together, and what is
not credible is refused.
"""

from .log_clocks import align_logs, moved_trace, use_monotonic_time
from .matching import MatchCoverage, Matched, align_and_match
from .suspensions import exclude_suspended
from .trace_clocks import fit_clock, vote_offsets
