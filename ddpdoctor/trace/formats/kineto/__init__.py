"""Reads the JSON of ``torch.profiler`` (Kineto's Chrome trace), from torch 1.8 on and from all vendors.

Files may be plain, compressed, truncated or damaged. Times are exact to the nanosecond. ``stream`` decodes the file in batches: it guesses
the boundaries between events, checks them, and repairs common errors. ``build`` converts each batch to columns at once, so memory grows
with the columns instead of the text. ``reader`` calls both, and rejects files of other tools.
"""

from .reader import read, recognises
