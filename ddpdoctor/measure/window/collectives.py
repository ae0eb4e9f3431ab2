"""A rank's collectives in its profiler window, as columns."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ddpdoctor.measure.numerics import Mask
from ddpdoctor.measure.taxonomy import SyncKind

ENGINE = "autograd::engine::evaluate_function"
"""How the names of the autograd engine's functions begin."""


class Collectives(msgspec.Struct, frozen=True):
    """Collectives of one rank in order of start; M rows. Times int64 ns."""

    start: NDArray[np.int64]
    """When this rank's part can start: its kernel's start; on the CPU, when it issued the collective."""
    end: NDArray[np.int64]
    issued: NDArray[np.int64]
    """When the host launched it; the start where that is not known."""
    launch_seen: Mask
    """Whether that is known."""
    operation: Sequence[str]
    group: Sequence[str]
    """Process group, "" where the trace does not say."""
    group_size: NDArray[np.int64]
    """Ranks in the process group; -1 unknown."""
    sequence: NDArray[np.int64]
    """Number in the group; -1 unknown."""
    bytes: NDArray[np.float64]
    """Bytes that the rank contributes; NaN unknown."""
    kind: Sequence[SyncKind]
    point_to_point: NDArray[np.bool_]
    ready: NDArray[np.int64]
    """When this rank's part could have started had the collectives before it been over: the computation that it
    waits for is done, and the host has launched it. Not after the start."""

    def __len__(self) -> int:
        return len(self.start)

    def shifted(self, offset_ns: int) -> Collectives:
        """The same with all times moved by ``offset_ns``."""
        return replace(
            self,
            start=self.start + offset_ns,
            end=self.end + offset_ns,
            issued=self.issued + offset_ns,
            ready=self.ready + offset_ns,
        )
