"""One clock for the step logs of several hosts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from .clock import fit_clock
from .points import Key, rank_points
from .steplog import RankLog

_FEWEST = 3


def align_logs(logs: Sequence[RankLog], notes: list[str]) -> None:
    """Shift each host's logs (in place) onto the first host's clock, by the ends of the collectives that both
    took part in."""
    hosts: dict[str, list[RankLog]] = defaultdict(list)
    for log in logs:
        hosts[log.host].append(log)
    if len(hosts) < 2:
        return
    names = list(hosts)
    reference = _ends(hosts[names[0]][0])
    for name in names[1:]:
        other = _ends(hosts[name][0])
        keys = sorted(set(reference) & set(other), key=lambda key: reference[key])
        if len(keys) < _FEWEST:
            notes.append(
                f"Hosts {names[0]} and {name} have no collectives in common: their clocks could not be compared, and are taken as they are."
            )
            continue
        fit = fit_clock(np.array([reference[k] for k in keys]), np.array([other[k] for k in keys]))
        if abs(fit.offset_ns) <= fit.error_ns:
            notes.append(
                f"Clock of host {name}: no offset against {names[0]} beyond the error of {fit.error_ns / 1e6:.3f} ms."
            )
            continue
        for log in hosts[name]:
            for step in log.steps:
                step.move(int(fit.correction(np.array([step.start]))[0]))
            offsets = fit.correction(np.array([t for t, _, _ in log.samples], np.int64)).tolist()
            log.samples = [
                (t + offset, user, leaf)
                for (t, user, leaf), offset in zip(log.samples, offsets, strict=True)
            ]
        notes.append(
            f"Clock of host {name}: {fit.offset_ns / 1e6:+.3f} ms against {names[0]}, drift {fit.drift * 1e6:+.1f} ppm, corrected by "
            f"{fit.pairs} collectives to within about {max(fit.error_ns, 1e3) / 1e6:.3f} ms."
        )


def _ends(log: RankLog) -> dict[Key, int]:
    return {point.key: point.end for point in rank_points(log) if point.root is None}
