"""Things numbered in the order in which they first appear."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from ddpdoctor.trace.columns import IdColumn


class Interner(defaultdict[Any, int]):
    """Gives each new key the next number; looking one up stays in C."""

    def __init__(self) -> None:
        super().__init__()
        self.default_factory = self.__len__

    def ids(self, keys: list[Any]) -> IdColumn:
        """The number of each key. Raises TypeError where one is a list or an object."""
        return np.fromiter(map(self.__getitem__, keys), np.int32, len(keys))
