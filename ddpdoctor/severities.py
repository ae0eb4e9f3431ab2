"""How severe findings are: known to the command line, which need not load the diagnosis for it."""

from __future__ import annotations

SEVERITIES = ("critical", "warning", "info")
"""The severest first."""


def is_as_severe(severity: str, least: str) -> bool:
    """Whether ``severity`` is ``least`` or severer."""
    return severity in SEVERITIES[: SEVERITIES.index(least) + 1]
