"""Finds the user's source lines that cause a measured time.

In: step logs or profiler windows, and a query: lines that did this kind of work, on these ranks, in these steps. Out: lines
by weight. Both kinds of recording have the same interface (:class:`SourceLines`), so that the costs of a cause are computed the same
way for either.
"""

from .from_logs import LogSourceLines
from .from_windows import WindowSourceLines
from .ranking import SourceLines, by_line, joined, ranked, with_heaviest
from .table import Kind, Samples, samples_of
from .workers import WorkersWork, with_worker_lines, with_workers, work_of_workers
