"""The operations of a whole job as columns."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

Integers = NDArray[np.int64]


class Operations(msgspec.Struct, frozen=True):
    """The operations of a job, N rows sorted by step, replica, stage and start."""

    source: str
    kinds: tuple[str, ...]
    """Names of the kinds of operations."""
    kind: Integers
    """[N] position in ``kinds``."""
    replica: Integers
    """[N] data-parallel rank."""
    stage: Integers
    """[N] pipeline stage."""
    rank: Integers
    """[N] rank of the process that was traced for this replica and stage."""
    step: Integers
    sequence: Integers
    """[N] number among the operations of the same kind, rank and step, by start."""
    chunk: Integers
    """[N] model chunk within the stage; -1 if the operation belongs to none."""
    model_chunk: Integers
    """[N] model chunk within the model; -1 if the operation belongs to none."""
    micro_batch: Integers
    """[N] -1 if the operation belongs to none."""
    start_s: NDArray[np.float64]
    duration_s: NDArray[np.float64]
    world_size: int | None = None
    """Ranks of the whole job, including tensor-parallel ones; None without a metadata file."""
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of operations."""
        return len(self.kind)

    @property
    def end_s(self) -> NDArray[np.float64]:
        """[N] end of each operation, s."""
        return self.start_s + self.duration_s

    def of_kind(self, *names: str) -> NDArray[np.bool_]:
        """[N] whether the operation is of one of these kinds."""
        return np.isin(self.kind, [i for i, name in enumerate(self.kinds) if name in names])

    def select(self, chosen: NDArray[np.bool_]) -> Operations:
        """The rows of the mask ``chosen`` [N]."""
        columns = msgspec.structs.asdict(self)
        rows: dict[str, Any] = {k: v[chosen] for k, v in columns.items() if isinstance(v, np.ndarray)}
        return replace(self, **rows)
