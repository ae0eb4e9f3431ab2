"""Results of ``ddpdoctor try`` in reports, also from hostile files."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console

from ddpdoctor.diagnose.trials import (
    Baseline,
    Parity,
    TrialsReport,
    Variant,
    read_trials,
    write_trials,
)
from ddpdoctor.errors import UnusableInput
from ddpdoctor.report import read
from ddpdoctor.report.experiment_view import experiment_view, note_text, print_experiment, verdict_text
from ddpdoctor.report.html import render_html
from ddpdoctor.report.markdown import render_markdown
from ddpdoctor.report.terminal import print_terminal
from tests.report import samples

GOOD = Variant(settings={"loader.num_workers": 4}, verdict="faster", change=-0.5, median_ms=10.0, trials=3)
BASELINE = Baseline(median_ms=20.0)
ESCAPES = "\x1b]0;PWN\x07\u202e\x9b31m"


def answer(*variants: Variant, **more: object) -> TrialsReport:
    return msgspec.structs.replace(TrialsReport(baseline=BASELINE, variants=list(variants)), **more)


def changed(**fields: object) -> Variant:
    return msgspec.structs.replace(GOOD, **fields)


def printed(found: TrialsReport, width: int = 160) -> str:
    out = io.StringIO()
    print_experiment(found, Console(file=out, width=width))
    return out.getvalue()


def test_long_notes_use_the_whole_terminal_width():
    why = "after 30 steps the ranks differ in how many batches they have left, so that the trial was ended early"
    lines = printed(answer(changed(verdict="failed", why=why, median_ms=None, change=None)), 80).splitlines()
    assert lines[2].split() == ["loader.num_workers=4", "failed"]
    assert lines[3] == "loader.num_workers=4: after 30 steps the ranks differ in how many batches they"
    assert len(lines) == 5


def test_texts_of_an_answer_are_escaped():
    hostile = changed(
        settings={"env.NCCL_X" + ESCAPES: "[bold]" + ESCAPES}, verdict=ESCAPES, why=samples.HOSTILE
    )
    shown = printed(
        answer(
            hostile,
            changed(results=ESCAPES),
            notes=[ESCAPES],
            baseline=Baseline(median_ms=None, failed=[ESCAPES]),
        )
    )
    assert not any(letter in shown for letter in "\x1b\x07\u202e\x9b")
    assert "[bold]" in shown


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"verdict": "\x1b]0;PWN\x07"}, "a verdict that is none of"),
        ({"change": -1.0}, "> -1.0"),
        ({"median_ms": -3.0}, ">= 0"),
        ({"median_ms": 1e300}, "<= 1e"),
        ({"interval_ms": [1.0]}, "of length"),
        ({"interval_ms": [2.0, 1.0]}, "an interval"),
        ({"trials": -1}, ">= 0"),
        ({"settings": {f"env.NCCL_{number}": 1 for number in range(65)}}, "length <= 64"),
        ({"settings": {"loader.num_workers": [4]}}, "got `array`"),
        ({"why": "x" * 5000}, "length <= 4000"),
    ],
)
def test_impossible_answers_are_refused(tmp_path, fields, says):
    file = tmp_path / "trials.json"
    write_trials(answer(changed(**fields)), file)
    with pytest.raises(UnusableInput, match=says) as refused:
        read_trials(file)
    assert "\x1b" not in str(refused.value)


def test_an_answer_round_trips_and_a_huge_one_is_refused(tmp_path):
    file = tmp_path / "trials.json"
    write_trials(answer(GOOD), file)
    assert read_trials(file) == answer(GOOD)
    write_trials(answer(*[GOOD] * 201), tmp_path / "many.json")
    with pytest.raises(UnusableInput, match="length <= 200"):
        read_trials(tmp_path / "many.json")
    document = json.loads(file.read_text())
    document["baseline"]["median_ms"] = "HUGE"
    file.write_text(json.dumps(document).replace('"HUGE"', "1e999"))
    with pytest.raises(UnusableInput):
        read_trials(file)


def test_result_changes_are_noted_for_faster_and_unexpected_variants():
    same = Parity(same_bits=True, says="The parameters are the same to the last bit.")
    differs = Parity(same_bits=False, says="The parameters differ.")
    odd = msgspec.structs.replace(differs, unexpected=True)
    assert note_text(changed(parity=same)) == "the parameters are the same to the last bit"
    assert note_text(changed(parity=differs)) == "the parameters differ"
    assert note_text(changed(parity=differs, verdict="slower")) == ""
    assert note_text(changed(parity=odd, verdict="slower")) == "the parameters differ"
    assert "differ" not in note_text(changed(parity=odd, bound=True))
    unknown = Parity(says="Two runs of the unchanged job already differ.")
    assert "already differ" in note_text(changed(parity=unknown, verdict="faster"))
    assert "already differ" not in note_text(changed(parity=unknown, verdict="slower"))


def test_a_variant_without_trials_is_not_measured():
    assert verdict_text(changed(verdict="not applied", trials=0)) == "not measured"
    assert verdict_text(changed(verdict="not applied", trials=1)) == "not applied"


def test_an_expected_upper_bound_is_shown_as_one():
    told = [
        changed(expected_ms=14.0, expected_range_ms=[12.0, 16.0]),
        changed(expected_ms=14.0, expected_range_ms=[12.0, 20.0]),
    ]
    assert [row[1] for row in experiment_view(answer(*told)).table.rows] == ["14.0", "≥ 12.0"]


def test_losses_are_shown_side_by_side():
    def with_losses(*pairs: list[float | None], **more: object) -> Variant:
        return changed(parity=Parity(losses=list(pairs)), **more)

    pairs = [[1.0 - 0.01 * number, 1.0 - 0.02 * number] for number in range(40)]
    bound = with_losses(*pairs, bound=True, settings={"ddp.no_sync": True})
    table = experiment_view(answer(with_losses(*pairs), with_losses(*pairs[:20], [None, 0.5]), bound)).losses
    assert table is not None
    assert table.head == ["backward", "unchanged", "loader.num_workers=4", "loader.num_workers=4"]
    assert [row[0] for row in table.rows] == ["1", "4", "7", "10", "12", "15", "18", "21"]
    assert table.rows[0] == ["1", "1", "1", "1"]
    assert table.rows[-1] == ["21", "0.8", "0.6", "0.5"]
    assert experiment_view(answer(GOOD, with_losses())).losses is None
    single = experiment_view(answer(with_losses([1.0, None]))).losses
    assert single is not None and single.rows == [["1", "1", ""]]
    diagnosis = msgspec.structs.replace(samples.unhealthy(), tried=answer(with_losses(*pairs)))
    assert "**Losses of rank 0**" in render_markdown(diagnosis)
    assert "Losses of rank 0, backward by backward" in render_html(diagnosis)


def test_a_diagnosis_with_impossible_trials_is_refused():
    unhealthy = msgspec.structs.replace(samples.minimal(), tried=answer(changed(verdict="?")))
    with pytest.raises(ValueError, match="tried: a verdict"):
        read.validated(unhealthy)


def test_markdown_and_the_terminal_show_the_table_below_its_heading():
    refused = changed(verdict="not applied", why="the loader has | no workers", median_ms=12.0)
    diagnosis = msgspec.structs.replace(
        samples.unhealthy(), tried=answer(GOOD, refused, notes=["The time was up."])
    )
    text = render_markdown(diagnosis)
    assert "**Measured with ddpdoctor try**" in text
    assert "| unchanged |  | 20.0 |  |" in text
    assert "| loader.num\\_workers=4 |  | 10.0 | faster, -50% |" in text
    assert "|  |  | not applied: the loader has \\| no workers |" in text
    assert "The time was up." in text
    out = io.StringIO()
    print_terminal(diagnosis, Console(file=out, width=160))
    assert "Measured with ddpdoctor try\n" in out.getvalue().replace(" \n", "\n")
