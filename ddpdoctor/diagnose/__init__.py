"""Applies rules to the measured facts and returns findings, their order, the verdict and the :class:`.diagnosis.Diagnosis`.

``load`` reads rule files, ``rule`` checks them, ``engine`` evaluates them, ``ordering`` sorts the findings, ``verdict`` chooses
the first sentence of a report. All thresholds are in the rule files.
"""
