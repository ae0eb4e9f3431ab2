"""Step logs and columns of traces → facts. Pure functions; no thresholds of diagnosis.

In: what was read of a run (``steplog``, ``window``). Out: a ``Measurement`` (``flow.measure``), with every fact that a rule may
read. The idea: one flow of stages, each a sub-package with a door of its own, in the order in which docs/architecture.md walks
through them. Nothing is imported here, so that whoever needs the types of facts does not load the stages.
"""
