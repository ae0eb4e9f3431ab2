"""One file that is meant to be a dump of torch's flight recorder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ddpdoctor.rundir.files import parsed, read_bounded

from .dumps import PICKLE
from .plainpickle import MOST_BYTES, MOST_CONTAINERS, NotPlainError, read_plain
from .recording import GroupKey, NoDumpError, Recording, recording_of

_MOST_VALUES = 6 << 20
"""Of a dump in JSON. One of 64 MiB as torch writes them has a quarter of that, as it has of containers."""


def read_dump(path: str, rank: int, known: Mapping[str, GroupKey] | None = None) -> Recording | str:
    """The dump in the file ``path``, or a sentence that says why there is none; ``known`` are groups that it need not tell."""
    try:
        data = read_bounded(path, MOST_BYTES, follow=True)
        if not data:
            return f"{path} is empty: rank {rank} was ended before it wrote its dump."
        document = read_plain(data) if PICKLE.match(data) else _json(data)
        return recording_of(document, rank, path, os.stat(path).st_mtime_ns, known)  # noqa: PTH116
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
    except (NotPlainError, NoDumpError, ValueError) as error:
        reason = str(error)
    return f"{path} is left out as a flight recorder dump: {reason}."


def _json(data: bytes) -> Any:
    """Raises ValueError, with a reason in words."""
    containers = data.count(b"[") + data.count(b"{")
    if containers > MOST_CONTAINERS or containers + data.count(b",") > _MOST_VALUES:
        raise ValueError("it holds more values than any recorder writes")
    return parsed(data)[0]
