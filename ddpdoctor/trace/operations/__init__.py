"""Reads a Parquet table of a whole job's operations, one row per operation, of pipeline- and data-parallel jobs.

The format that ByteDance published with "Understanding Stragglers in Large Model Training Using What-if Analysis"
(OSDI '25; https://github.com/ByteDance-Seed/StragglerAnalysis): ``trace-<name>.parquet`` and next to it
``meta-<name>.yaml``. The result is :class:`Operations`. It covers a whole job and has no events, so it is not a format of
:mod:`ddpdoctor.trace.formats` and is measured by :mod:`ddpdoctor.measure.pipeline`.
"""

from .read import find_operations, read_operations
from .table import Operations
