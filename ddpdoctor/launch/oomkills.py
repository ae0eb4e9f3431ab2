"""Counts the processes of a control group that the kernel killed for lack of memory just before a rank of it ended."""

from __future__ import annotations

import time

from ddpdoctor.telemetry.host import Cgroup

_EXIT_S = 10.0
"""Longest time between the kernel's count of a kill and the end of the killed process, which frees its memory in between."""


class OomKills:
    """The kills in one control group, which ranks of several attempts and other programs may share."""

    def __init__(self, group: Cgroup) -> None:
        self._group = group
        self.total = group.oom_kills() or 0
        """The kernel's count at the last ``update``."""
        self._before = self.total
        """The count without the kills of the last ``_EXIT_S``."""
        self._rose_s = time.monotonic()
        """When the count last rose."""

    def update(self) -> None:
        """Read the kernel's count; call this at each poll."""
        now_s, total = time.monotonic(), self._group.oom_kills()
        if now_s - self._rose_s > _EXIT_S:
            self._before = self.total
        if total is None:
            return
        if total > self.total:
            self._rose_s = now_s
        self.total, self._before = total, min(self._before, total)  # a group of the same name counts from 0

    def recent(self, began: int = 0) -> int:
        """Number of kills within the last ``_EXIT_S`` and after the count was ``began``."""
        return self.total - max(self._before, began)
