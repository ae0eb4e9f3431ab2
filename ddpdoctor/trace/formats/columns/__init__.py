"""Our own columns as a file (``.columns``): what ``ddpdoctor digest`` makes of any trace.

The file's name tells it; its content is checked (:func:`ddpdoctor.trace.columns.read_archive`). Rank and host are those
that were found where the trace lay, not those of the place that it was copied to.
"""

from .read import read, recognises
