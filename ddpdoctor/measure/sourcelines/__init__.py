"""The user's source lines behind a measurement.

In: step logs or profiler windows, and a query: which lines did this kind of work, on these ranks, in these steps. Out: lines
by weight. Both kinds of recording have the same interface (:class:`SourceLines`), so that pricing a cause does not depend on
which of them is the primary one.
"""

from .from_logs import LogSourceLines
from .from_windows import WindowSourceLines
from .ranking import SourceLines, by_line, joined, ranked, with_heaviest
from .table import Kind, Samples, samples_of
from .workers import WorkersWork, led_by_workers, with_workers, work_of_workers
