"""How severe findings are: known to the command line, which need not load the diagnosis for it."""

from __future__ import annotations

SEVERITIES = ("critical", "warning", "info")
"""The severest first."""
