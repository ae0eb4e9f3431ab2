"""Recordings of other programs, which are told by their names or first bytes, and refused with what to do instead.

A file lies here only as long as nobody reads its kind: each is refused in one sentence that names the program it is of.
"""

from .refuse import read, recognises
