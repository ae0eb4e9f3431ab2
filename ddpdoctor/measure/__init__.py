"""Columns → facts: one clock, matched collectives, breakdown, blame and what-if. Pure functions; no
thresholds of diagnosis."""
