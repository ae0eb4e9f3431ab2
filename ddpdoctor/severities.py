"""Severities of findings, in a separate module so that the command line need not import the diagnosis."""

from __future__ import annotations

SEVERITIES = ("critical", "warning", "info")
"""In descending order."""


def is_as_severe(severity: str, threshold: str) -> bool:
    """Whether ``severity`` is at least as severe as ``threshold``."""
    return severity in SEVERITIES[: SEVERITIES.index(threshold) + 1]
