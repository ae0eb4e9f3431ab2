"""Compute facts from step logs and columns of traces. Pure functions, without the thresholds of rules.

In: the recordings of a run (``steplog``, ``window``). Out: a ``Measurement`` (``flow.measure``) with every fact that a rule may read.
Each stage is a sub-package, in the order of docs/architecture.md. This module imports nothing, so that importing the types of facts
does not load the stages.
"""
