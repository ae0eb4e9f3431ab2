"""The JSON lines of NCCL Inspector, the plugin that writes one for each collective that a rank was in.

It writes when a collective ran, on the device, if it was asked to (``NCCL_INSPECTOR_DUMP_VERBOSE=1``). Then each is a kernel of
its communicator, with its number there and its size: who came late, and how fast it went, follows as from a trace, and nothing
of what ranks did in between.
"""

from .read import read, recognises

__all__ = ["read", "recognises"]
