"""Traces of pipeline- and data-parallel jobs as one Parquet table of operations, one row each.

The format that ByteDance published with "Understanding Stragglers in Large Model Training Using What-if Analysis"
(OSDI '25; https://github.com/ByteDance-Seed/StragglerAnalysis): ``trace-<name>.parquet`` and beside it
``meta-<name>.yaml``. A table goes in, :class:`Operations` come out. It holds a whole job and no events, so it is no
format of a rank's trace (:mod:`ddpdoctor.trace.formats`) and is measured in a way of its own.
"""

from .read import find_operations, read_operations
from .table import Operations
