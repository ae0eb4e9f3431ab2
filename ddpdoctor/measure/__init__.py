"""Step logs and columns of traces → facts. Pure functions; no thresholds of diagnosis.

In: what was read of a run (``steplog``, ``window``). Out: a ``Measurement`` (``flow.measure``), with every fact that a rule may read.
Each stage is a sub-package, in the order of docs/architecture.md. Nothing is imported here, so that importing the types of facts does
not load the stages.
"""
