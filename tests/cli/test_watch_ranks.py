"""The table of ranks of ``ddpdoctor watch``: order, phases and current line; the metrics that it serves."""

from __future__ import annotations

import io
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from ddpdoctor import analyze
from ddpdoctor.cli.watch_loop import findings_page, serve_findings
from ddpdoctor.cli.watch_view import LineOfCode, Sort, View, phase_bar, rank_table
from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.telemetry.live import LiveRun
from tests.cli.live import free_port, metrics
from tests.commands import ROOT, command

RUN = Path(__file__).parents[2] / "fixtures" / "slow-data-one-rank"


@pytest.fixture
def run():
    """A running job in which rank 1 waits for data."""
    live = LiveRun(RUN)
    live.update()
    live.manifest["ended_ns"] = None
    for rank in live.ranks.values():
        rank.ended = False
    return live


def lines(drawn, width=200):
    console = Console(file=io.StringIO(), width=width)
    console.print(drawn)
    return [line.split() for line in console.file.getvalue().splitlines()]


def order(run, view):
    return [line[0] for line in lines(rank_table(run, view, {}))[1:]]


def test_ranks_are_sorted_in_the_chosen_order(run):
    assert order(run, View()) == ["0", "1"] and order(run, View(reverse=True)) == ["1", "0"]
    for sort in (Sort.LATE, Sort.DATA, Sort.STEP):
        assert order(run, View(sort=sort)) == ["1", "0"]
        assert order(run, View(sort=sort, reverse=True)) == ["0", "1"]


def test_ranks_without_values_come_last(run):
    run.samples["host1"]["ranks"] = {"1": {"rss_bytes": 5e8}}
    for reverse in (False, True):
        assert order(run, View(sort=Sort.MEMORY, reverse=reverse)) == ["1", "0"]


def test_keys_change_the_view_and_one_ends(run):
    view = View()
    assert [view.handle_key("s") or view.sort for _ in Sort] == [*list(Sort)[1:], Sort.RANK]
    assert not view.handle_key("r") and view.reverse and not view.handle_key("p") and view.phases
    assert not view.handle_key("x") and not view.handle_key("") and view.handle_key("q")


def test_the_phases_of_each_rank_and_of_all(run):
    heading, *rows = lines(rank_table(run, View(phases=True), {}))
    assert heading == ["rank", "data", "forward", "backward", "optimizer", "other"]
    shares = {row[0]: [int(cell) for cell in row[1:] if cell != "%"] for row in rows}
    assert shares["1"][0] > 50 > 5 > shares["0"][0] and shares["0"][2] > 50
    assert all(97 <= sum(each) <= 103 for each in shares.values())
    bar, legend = phase_bar(run)
    assert set(bar.plain) == {"█"} and 48 <= len(bar.plain) <= 50
    assert "■ data " in legend.plain and "■ backward " in legend.plain


def test_the_current_line_of_a_rank_is_shown_if_known(run):
    said = {1: {"phase": "data", "user": [["/home/me/train.py", 57, "main"]], "frames": []}}
    rows = {row[0]: " ".join(row) for row in lines(rank_table(run, View(), said))[1:]}
    assert "data train.py:57 for" in rows["1"] and "in a step for" in rows["0"]
    run.ranks[0].ended = True
    rows = {row[0]: row for row in lines(rank_table(run, View(), said))[1:]}
    assert rows["0"][-1] == "ended"


def test_a_narrow_terminal_keeps_the_number_of_the_line(run):
    run.ranks[1].host = "gpu-node-0123.cluster.internal"  # of several hosts the column is shown
    long = "a_training_script_of_mine.py"
    for hosts, name, shown in (
        (1, "train.py", "train.py:57"),
        (1, "pretrain_gpt.py", "pretrain_gpt.py:57"),
        (2, long, "mine.py:57"),
    ):
        run.ranks[0].host = run.ranks[1].host if hosts == 1 else "other-node"
        said = {1: {"phase": "data", "user": [[f"/home/me/{name}", 57, "main"]], "frames": []}}
        drawn = lines(rank_table(run, View(), said), 80)
        assert any(word.endswith(shown) for line in drawn for word in line), drawn
        assert ("host" in drawn[0]) == (hosts > 1)


@pytest.mark.parametrize(
    ("width", "drawn"),
    [
        (80, "rank 1 is stuck at /home/me/a/b/train.py:57 (load)"),
        (46, "rank 1 is stuck at …/me/a/b/train.py:57 (load)"),
        (40, "rank 1 is stuck at …/train.py:57 (load)"),
        (12, "rank 1 is stuck at train.py:57 (load)"),
        (8, "rank 1 is stuck at …n.py:57 (load)"),
    ],
)
def test_a_path_loses_its_first_folders_first(width, drawn):
    placed = LineOfCode("rank 1 is stuck at ", ["/home/me/a/b/train.py", 57, "load"], " (load)")
    assert " ".join(word for line in lines(placed, width) for word in line) == drawn


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
