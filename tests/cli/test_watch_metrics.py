"""The verdict so far as metrics, as ``ddpdoctor watch --prometheus`` serves it."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from ddpdoctor import analyze
from ddpdoctor.cli.watch_loop import findings_page, serve_findings
from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.errors import DdpDoctorError
from tests.cli.live import free_port, metrics
from tests.commands import ROOT, command

RUN = ROOT / "fixtures" / "slow-data-one-rank"


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    return analyze(str(RUN))


def test_each_finding_has_its_rank_and_its_cost(diagnosis: Diagnosis) -> None:
    page = findings_page(diagnosis, 3.5)
    assert f'ddpdoctor_verdict_info{{rule="{diagnosis.verdict.rule}"}} 1.0' in page
    assert "ddpdoctor_verdict_age_seconds{} 3.5" in page
    first = diagnosis.findings[0]
    assert f'ddpdoctor_finding_info{{rule="{first.rule}",severity="{first.severity}",rank="1"}} 1.0' in page
    assert first.costs_ms_per_step is not None
    assert (
        f'ddpdoctor_finding_cost_seconds{{rule="{first.rule}",bound="estimate"}} {first.costs_ms_per_step / 1000!r}'
        in page
    )


@pytest.mark.parametrize(("ranks", "label"), [(None, "all"), ([3], "3"), ([0, 3], "several")])
def test_a_set_of_ranks_is_no_series_of_its_own(
    diagnosis: Diagnosis, ranks: list[int] | None, label: str
) -> None:
    finding = replace(diagnosis.findings[0], ranks=ranks)
    assert f'rank="{label}"' in findings_page(replace(diagnosis, findings=[finding]), 0.0)


def test_no_verdict_and_a_healthy_job_differ(diagnosis: Diagnosis) -> None:
    healthy = replace(diagnosis, findings=[], verdict=replace(diagnosis.verdict, rule=None), healthy=True)
    assert 'ddpdoctor_verdict_info{rule="none"} 1.0' in findings_page(healthy, 0.0)
    assert 'ddpdoctor_verdict_info{rule="unknown"} 1.0' in findings_page(None, 0.0)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on this machine")
def test_promtool_has_nothing_to_say(diagnosis: Diagnosis) -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=findings_page(diagnosis, 1.0), capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_is_served_until_it_is_stopped(diagnosis: Diagnosis) -> None:
    port = free_port()
    stop = serve_findings(("127.0.0.1", port), lambda: (diagnosis, time.monotonic()))
    try:
        assert "ddpdoctor_finding_info" in metrics(port, patient=False)
        with pytest.raises(DdpDoctorError, match="cannot be served on"):
            serve_findings(("127.0.0.1", port), lambda: (None, 0.0))
    finally:
        stop()
    assert metrics(port) == ""


def test_one_frame_serves_nothing() -> None:
    done = command("watch", str(RUN), "--once", "--prometheus", "9401")
    assert done.returncode == 2 and "--once prints one frame" in done.stderr


def test_the_document_names_each_metric(diagnosis: Diagnosis) -> None:
    text = (Path(ROOT) / "docs" / "monitoring.md").read_text()
    names = {
        line.split()[2] for line in findings_page(diagnosis, 0.0).splitlines() if line.startswith("# TYPE")
    }
    assert names and all(name in text for name in names)
