"""The JSON of ``torch.profiler`` (Kineto's Chrome trace), of torch 1.8 and newer and of all vendors.

A file of text goes in, plain or compressed, whole, cut off or damaged; one rank's columns come out, exact to the
nanosecond. It is decoded batch by batch, with boundaries between events guessed and checked and the usual faults put right
(``stream``), and each batch turned into columns at once (``build``), so that memory grows with the columns and not with the text.
"""

from .read import read, recognises
