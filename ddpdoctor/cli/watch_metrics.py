"""The verdict so far as metrics for Prometheus, served by ``ddpdoctor watch --prometheus``."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from ddpdoctor.diagnose.diagnosis import Diagnosis, Finding
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.telemetry import Sample, page_of, served

FINDING_METRICS: Mapping[str, str] = {
    "ddpdoctor_verdict_info": (
        "1 for the rule of the verdict: none for a healthy job, unknown if there is no verdict."
    ),
    "ddpdoctor_verdict_age_seconds": "Seconds since the analysis that found the verdict and the findings.",
    "ddpdoctor_finding_info": "1 for each finding of the newest analysis.",
    "ddpdoctor_finding_cost_seconds": "Time per step that each finding costs; if bound is at_most, it may cost nothing.",
}
"""Help text by metric. Labels: ``rule``; of findings also ``severity`` and ``rank``, or for the cost ``bound``."""


def rank_label(finding: Finding) -> str:
    """The rank, "all", or "several": more would make a new series of each set of ranks."""
    if finding.ranks is None:
        return "all"
    return str(finding.ranks[0]) if len(finding.ranks) == 1 else "several"


def findings_page(diagnosis: Diagnosis | None, age_s: float) -> str:
    """The metrics page of the newest diagnosis, which was made ``age_s`` seconds ago; None: there is none."""
    return page_of(FINDING_METRICS, _samples(diagnosis, age_s))


def _samples(diagnosis: Diagnosis | None, age_s: float) -> Iterator[Sample]:
    healthy = diagnosis is not None and diagnosis.healthy
    verdict = None if diagnosis is None else diagnosis.verdict.rule
    yield "ddpdoctor_verdict_info", {"rule": verdict or ("none" if healthy else "unknown")}, 1.0
    if diagnosis is None:
        return
    yield "ddpdoctor_verdict_age_seconds", {}, age_s
    for finding in diagnosis.findings:
        labels = {"rule": finding.rule, "severity": finding.severity, "rank": rank_label(finding)}
        yield "ddpdoctor_finding_info", labels, 1.0
        cost_ms = finding.costs_ms_per_step
        bound = "at_most" if finding.at_most else "estimate"
        yield (
            "ddpdoctor_finding_cost_seconds",
            {"rule": finding.rule, "bound": bound},
            None if cost_ms is None else cost_ms / 1000.0,
        )


def serve_findings(
    address: tuple[str, int], newest: Callable[[], tuple[Diagnosis | None, float]]
) -> Callable[[], None]:
    """Serve them in a thread until the function returned is called; ``newest``: the diagnosis and when it was made, monotonic, s.
    Raises DdpDoctorError if the address cannot be served on."""

    def page() -> str:
        diagnosis, made_s = newest()
        return findings_page(diagnosis, time.monotonic() - made_s)

    try:
        scrapes = served(address, page)
    except (OSError, OverflowError) as error:
        raise DdpDoctorError(
            f"--prometheus: {address[0]}:{address[1]} cannot be served on: {error}."
        ) from error
    ended, end = os.pipe()
    thread = threading.Thread(target=scrapes.serve, args=(ended,), daemon=True)
    thread.start()

    def stop() -> None:
        os.close(end)
        thread.join()
        os.close(ended)

    return stop
