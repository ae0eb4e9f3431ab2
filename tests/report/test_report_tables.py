"""The ranks' memory in reports: one line on the terminal, a table in the page; the table of attempts."""

from __future__ import annotations

import io

import msgspec
import pytest
import samples
from rich.console import Console

from ddpdoctor.diagnose.diagnosis import Diagnosis, RankMemory, Verdict
from ddpdoctor.measure.runfacts import AttemptFacts
from ddpdoctor.report.html import render_html
from ddpdoctor.report.tables import attempts_table, memory_line, memory_table
from ddpdoctor.report.terminal import print_terminal

GB = float(1 << 30)
ON_HOST = RankMemory(process_bytes=2 * GB, workers_bytes=0.5 * GB, grows_bytes_per_hour=3 * GB)
ON_DEVICE = RankMemory(
    process_bytes=2 * GB,
    allocated_peak_bytes=60 * GB,
    reserved_peak_bytes=70 * GB,
    device_total_bytes=80 * GB,
    phase_peak_bytes={"backward": 60 * GB, "data": 20 * GB, "forward": 50 * GB},
)


def with_memory(*memory: RankMemory | None, **facts: object) -> Diagnosis:
    unhealthy = samples.unhealthy()
    ranks = [
        msgspec.structs.replace(rank, memory=each) for rank, each in zip(unhealthy.ranks, memory, strict=True)
    ]
    return msgspec.structs.replace(unhealthy, ranks=ranks, facts={**unhealthy.facts, "memory": facts})


def test_the_line_has_the_fullest_rank_and_the_unused_memory():
    found = with_memory(ON_HOST, RankMemory(process_bytes=GB), headroom_bytes=9 * GB)
    assert memory_line(found) == (
        "peak host memory: 2 GiB on the rank that used the most, up to 512 MiB more in child processes; 9 GiB per rank "
        "free at the peak"
    )
    screen = io.StringIO()
    print_terminal(found, Console(file=screen, width=160))
    assert memory_line(found) in screen.getvalue()


def test_device_memory_comes_before_process_memory():
    line = memory_line(with_memory(ON_DEVICE, ON_DEVICE, headroom_bytes=9 * GB))
    assert line.startswith(
        "peak device memory: 70 GiB of 80 GiB reserved on the rank that used the most, up to 60 GiB of it by tensors; 9 GiB per "
        "rank free at the peak; peak host memory: "
    )
    assert line.count("free at the peak") == 1


def test_the_table_has_only_columns_with_values():
    table = memory_table(with_memory(ON_HOST, RankMemory(process_bytes=GB)))
    assert table is not None
    assert table.head == ["rank", "process", "child processes", "process grows"]
    assert [row[0] for row in table.rows] == ["0", "1"] and table.rows[0][-1] == "3 GiB per hour"
    on_device = memory_table(with_memory(ON_DEVICE, ON_HOST))
    assert on_device is not None and "tensors in backward" in on_device.head
    assert "tensors in optimizer" not in on_device.head and "tensors in data" not in on_device.head


def test_without_values_there_is_no_line():
    assert memory_line(samples.unhealthy()) == "" and memory_table(samples.unhealthy()) is None
    assert 'id="memory"' not in render_html(samples.unhealthy())
    assert 'id="memory"' in render_html(with_memory(ON_HOST, None))


@pytest.mark.parametrize("width", [80, 120])
def test_growing_memory_is_on_the_first_screen(width):
    unhealthy = samples.unhealthy()
    title = "The dataloader workers of rank 0 grow by 3 MiB per step"
    growth = msgspec.structs.replace(
        unhealthy.findings[0],
        rule="memory/workers-growing",
        title=title,
        costs_ms_per_step=None,
        severity="info",
    )

    def screen(found: Diagnosis) -> str:
        out = io.StringIO()
        print_terminal(found, Console(file=out, width=width))
        return out.getvalue()

    beside = msgspec.structs.replace(unhealthy, findings=[*unhealthy.findings, growth])
    assert screen(beside).count(title) == 1 and screen(unhealthy).count(title) == 0
    alone = msgspec.structs.replace(
        unhealthy,
        findings=[growth],
        healthy=True,
        verdict=Verdict(None, f"No warnings (9 steps of 2 ranks), but note: {title}"),
    )
    assert screen(alone).replace("\n", " ").count(title) == 1


@pytest.mark.parametrize("odd", ["much", True, float("inf"), None, {"a": 1}])
def test_invalid_facts_of_a_diagnosis_are_ignored(odd):
    assert "free at the peak" not in memory_line(with_memory(ON_HOST, None, headroom_bytes=odd))
    assert memory_line(msgspec.structs.replace(with_memory(ON_HOST, None), facts={"memory": odd}))


@pytest.mark.parametrize(
    ("first_step", "steps", "saved"),
    [(1160, "1,160 – 1,229", "step 1,200"), (None, "70 steps", "after 41 steps")],
)
def test_steps_and_checkpoint_of_an_attempt_have_one_count(first_step: int | None, steps: str, saved: str):
    attempts = [
        AttemptFacts(number=1, steps=90),
        AttemptFacts(number=2, first_step=first_step, steps=70, checkpoint_step=40),
    ]
    facts = {"run": {"attempts": msgspec.to_builtins(attempts)}}
    table = attempts_table(msgspec.structs.replace(samples.minimal(), facts=facts))
    assert table is not None
    assert [table.rows[1][table.head.index(name)] for name in ("steps", "last checkpoint")] == [
        steps,
        saved,
    ]
