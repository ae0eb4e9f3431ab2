"""The user's source lines behind a measurement.

In: logs or windows, and a question: which lines did this kind of work, on these ranks, in these steps. Out: lines by weight.
The idea: both kinds of recording answer the same questions (:class:`SourceLines`), so that who prices a cause need not know
which of them speaks.
"""

from .from_logs import LogSourceLines
from .from_windows import WindowSourceLines
from .ranking import SourceLines, joined, ranked
from .table import Kind, Samples, samples_of
