"""Severities of findings, in their own module so that the command line does not import the diagnosis."""

from __future__ import annotations

SEVERITIES = ("critical", "warning", "info")
"""The most severe first."""


def is_as_severe(severity: str, least: str) -> bool:
    """Whether ``severity`` is at least as severe as ``least``."""
    return severity in SEVERITIES[: SEVERITIES.index(least) + 1]
