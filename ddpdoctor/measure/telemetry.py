"""The interface through which the analysis reads a host's telemetry; ``ddpdoctor.telemetry`` implements it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Column = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Times (epoch ns) and values; NaN without a reading."""


class HostTelemetry(Protocol):
    """One host's telemetry; implemented by ``telemetry.reader.Telemetry``."""

    @property
    def header(self) -> dict[str, Any]: ...
    @property
    def gpus(self) -> list[dict[str, Any]]: ...
    @property
    def ranks(self) -> list[int]: ...
    def gpu_column(self, index: int, field: str) -> Column: ...
    def gpu_values(self, index: int, field: str) -> tuple[NDArray[np.int64], list[Any]]: ...
    def host_column(self, field: str) -> Column: ...
    def other_programs(self) -> tuple[NDArray[np.int64], list[list[dict[str, Any]] | None]]: ...
    def rank_column(self, rank: int, field: str) -> Column: ...
