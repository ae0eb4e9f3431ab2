"""By what a collective is known on every rank: its process group, operation and size."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from ddpdoctor.measure.window import Window


def group_keys(window: Window) -> list[Hashable]:
    """Process group of each collective, told apart by its ranks where the file lists them: names repeat between
    disjoint groups in some versions. As text, which remembers its hash: a group may have thousands of ranks."""
    known: dict[str, Hashable] = {}
    for group in window.trace.meta.process_groups:
        if group.get("ranks"):
            known.setdefault(str(group.get("pg_name")), f"{group.get('pg_name')} {group['ranks']}")
    return [known.get(name, name) for name in window.collectives.group]


def labels(window: Window) -> list[Hashable]:
    """[M] what the same collective has in common on all ranks, the number apart."""
    comms, keys = window.collectives, group_keys(window)
    return [
        (
            keys[i],
            comms.operation[i],
            -1.0 if np.isnan(comms.bytes[i]) else float(comms.bytes[i]),
        )
        for i in range(len(comms))
    ]
