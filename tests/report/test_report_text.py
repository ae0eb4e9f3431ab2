"""Terminal and Markdown."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
import samples
from rich.console import Console

from ddpdoctor.report import print_terminal, render_markdown

ESCAPE = "\x1b"


def shown(diagnosis, colour=False, width=80, **options):
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, force_terminal=colour, color_system="truecolor" if colour else None
    )
    print_terminal(diagnosis, console, **options)
    return stream.getvalue()


@pytest.mark.parametrize("name", sorted(samples.ALL))
@pytest.mark.parametrize("colour", [True, False])
def test_it_fits_eighty_columns(name, colour):
    text = re.sub(r"\x1b\[[\d;]*m", "", shown(samples.ALL[name](), colour, verbose=True))
    assert text.strip() and max(len(line) for line in text.splitlines()) <= 80


def test_it_says_what_where_why_and_how():
    text = shown(samples.sick())
    assert text.startswith("Rank 1 waits 46 ms a step for data; all others wait for it\n")
    row = next(line for line in text.splitlines() if line.startswith("dataloader/one-rank-late"))
    assert row.split() == ["dataloader/one-rank-late", "rank", "1", "44.8", "7.1×", "train.py:57"]
    assert (
        "num_workers=4" in text
        and "Trade-off:" in text
        and "Note: No GPU was found" in text.replace("\n", " ")
    )
    assert "2 rules looked and found nothing, 1 could not look." in text


def test_a_healthy_job_is_told_calmly():
    text = shown(samples.healthy())
    assert text.startswith("Healthy:") and "Fix" not in text and "finding  " not in text


def test_nothing_known_is_a_single_line():
    assert shown(samples.minimal()) == "Nothing found\n"


def test_quiet_is_the_verdict_alone():
    assert shown(samples.sick(), quiet=True).splitlines() == [
        "Rank 1 waits 46 ms a step for data; all others wait for it"
    ]


def test_verbose_shows_evidence_and_why_rules_were_skipped():
    text = shown(samples.sick(), verbose=True)
    assert "Batches that stood ready: not recorded" in text
    assert "compute/throttled: no GPU telemetry was recorded" in text


def test_colours_only_where_there_are_some(monkeypatch):
    assert ESCAPE not in shown(samples.sick())
    assert ESCAPE in shown(samples.sick(), colour=True)
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    print_terminal(samples.sick(), Console(file=stream, force_terminal=True, width=80))
    assert not re.search(r"\x1b\[[\d;]*3\dm", stream.getvalue())


def test_names_cannot_drive_the_terminal_or_its_markup():
    evil = "\x1b[2J\x07[red]x[/red][/nonsense]"
    sick = samples.sick()
    finding = msgspec.structs.replace(sick.findings[0], title=evil, rule=evil, explanation=evil)
    text = shown(msgspec.structs.replace(sick, findings=[finding], notes=[evil]))
    assert ESCAPE not in text and "\x07" not in text and "[red]x[/red][/nonsense]" in text


def test_markdown_is_short_and_complete():
    text = render_markdown(samples.sick())
    assert text.startswith("## Rank 1 waits 46 ms a step for data")
    assert "all others wait for it (critical) | rank 1 | 44.8 ms (87 %) | 7.1× | `train.py:57` |" in text
    assert "```python\nloader = DataLoader(" in text
    assert len(text.splitlines()) < 60


def test_markdown_escapes_what_programs_say():
    text = render_markdown(samples.hostile())
    outside_code = re.sub(r"```.*?```|(`+).*?\1", "", text, flags=re.DOTALL)
    assert "<img" not in outside_code and "</script>" not in outside_code
    assert all(line.count(" | ") <= 6 for line in text.splitlines() if line.startswith("|"))


def test_markdown_of_a_healthy_and_of_an_empty_job():
    assert "|" not in render_markdown(samples.healthy())
    assert render_markdown(samples.minimal()).startswith("## Nothing found")
