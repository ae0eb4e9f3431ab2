"""Formats of profiler traces, one module or subpackage each, which reads a file into one rank's columns.

Each implements :class:`Format`: ``recognises`` identifies its files by name or first bytes, ``read`` returns
their columns. If a file can have several ranks, ``parts`` returns an address for each (:class:`MultiRankFormat`).
Modules and subpackages here are found at run time; there is no list of formats. A file that no format recognises is read as
Kineto's JSON, whose reader gives the error message.
"""

from .registry import HEAD_BYTES, Candidate, Format, failed_formats, file_of, is_trace, load_trace, parts_of
