"""One analysis, its CPU seconds by stage as JSON. Runs in a process of its own for each measurement.

    python benchmarks/loading/stages.py PLACE [analysis | opening]

The stages are those of the road from paths to a diagnosis, or those of listing and opening a run; what a stage has called
in another one counts there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ddpdoctor.analysis import Options, analyze, driver
from ddpdoctor.measure import flow
from ddpdoctor.rundir.reader import RunDirectory

STAGES = {
    "analysis": {
        "read": (driver, "load"),
        "windows": (driver, "windows_of"),
        "align logs": (flow, "align_logs"),
        "graphs": (flow, "build_graphs"),
        "attribution": (flow, "attribute"),
        "prices": (flow, "price_all"),
        "other measures": (driver, "measure"),
        "judge": (driver, "_diagnosis_of"),
    },
    "opening": {
        "list": (driver, "expand_run_directories"),
        "open": (RunDirectory, "open"),
        "read": (driver, "load"),
    },
}
"""Where the road takes each stage from."""


class Clock:
    """CPU seconds of this process by stage, those of a stage within another one apart."""

    def __init__(self, stages: Iterable[str]) -> None:
        self.spent_s = dict.fromkeys(stages, 0.0)
        self._within = [0.0]

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, whose time counts as ``stage``."""

        def call(*arguments: Any, **named: Any) -> Any:
            self._within.append(0.0)
            began_s = time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                took_s = time.process_time() - began_s
                self.spent_s[stage] += took_s - self._within.pop()
                self._within[-1] += took_s

        return call


def main(place: str, only: str = "analysis") -> None:
    """Analyse what lies at ``place``, or only open it."""
    clock = Clock(STAGES[only])
    for stage, (owner, name) in STAGES[only].items():
        setattr(owner, name, clock.timed(stage, getattr(owner, name)))
    counted: list[int] = []
    load = driver.load

    def counting(*arguments: Any) -> Any:
        inputs = load(*arguments)
        counted.append(sum(trace.size for trace in inputs.traces))
        counted.append(sum(len(log.steps) for log in inputs.logs))
        return inputs

    driver.load = counting
    options = Options(cache=False, jobs=1)
    if only == "opening":
        places, skipped = driver.expand_run_directories([place])
        driver.load(places, options, skipped)
    else:
        analyze([place], options)
    print(
        json.dumps({"rows": counted[0], "steps": counted[1], "peak_mb": _peak_mb(), "cpu_s": clock.spent_s})
    )


def _peak_mb() -> float:
    """Of this program alone: what getrusage tells begins with the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
