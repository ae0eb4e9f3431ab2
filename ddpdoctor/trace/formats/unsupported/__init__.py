"""Recordings of other programs that ddpdoctor cannot read: recognised by name or first bytes and rejected with advice."""

from .refuse import read, recognises
