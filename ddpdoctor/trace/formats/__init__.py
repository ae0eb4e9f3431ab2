"""Formats of profiler traces, a folder each: a file goes in, one rank's columns come out.

The door of each folder is a :class:`Format`: ``recognises`` tells its own files by their name or first bytes, ``read``
makes columns of one; where a file may hold several ranks, ``parts`` gives each an address. A folder is a format by being here;
nothing else lists it. What none recognises is read as Kineto's JSON, whose reader says what is wrong with it: a trace of
another program is refused with a sentence.
"""

from .registry import HEAD_BYTES, Candidate, Format, file_of, is_trace, load_trace, parts_of
