"""What was tried, as reports show it: files that anybody can have written included."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console

from ddpdoctor.diagnose.tried import Answer, Baseline, Parity, Variant, fault_of, read_answer, write_answer
from ddpdoctor.errors import UnusableInput
from ddpdoctor.report import render_html, sound
from ddpdoctor.report.markdown import render_markdown
from ddpdoctor.report.terminal import print_terminal
from ddpdoctor.report.tried import print_answer, tried_view
from tests.report import samples

GOOD = Variant(settings={"loader.num_workers": 4}, verdict="faster", change=-0.5, median_ms=10.0, trials=3)
BASELINE = Baseline(median_ms=20.0)
ESCAPES = "\x1b]0;PWN\x07\u202e\x9b31m"


def answer(*variants: Variant, **more: object) -> Answer:
    return msgspec.structs.replace(Answer(baseline=BASELINE, variants=list(variants)), **more)


def changed(**fields: object) -> Variant:
    return msgspec.structs.replace(GOOD, **fields)


def printed(found: Answer) -> str:
    out = io.StringIO()
    print_answer(found, Console(file=out, width=160))
    return out.getvalue()


def test_no_text_of_an_answer_is_obeyed_by_a_terminal_or_read_as_markup():
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
        ({"change": -1.0}, "below 0"),
        ({"median_ms": -3.0}, "below 0"),
        ({"median_ms": 1e300}, "out of range"),
        ({"interval_ms": [1.0]}, "an interval"),
        ({"trials": -1}, "a count"),
        ({"settings": {f"env.NCCL_{number}": 1 for number in range(65)}}, "more than 64 settings"),
        ({"settings": {"loader.num_workers": [4]}}, "neither a number nor a text"),
        ({"why": "x" * 5000}, "letters"),
    ],
)
def test_what_no_experiment_finds_is_refused(tmp_path, fields, says):
    file = tmp_path / "trials.json"
    write_answer(answer(changed(**fields)), file)
    with pytest.raises(UnusableInput, match=says) as refused:
        read_answer(file)
    assert "\x1b" not in str(refused.value)


def test_an_answer_is_read_as_written_and_a_flood_is_not(tmp_path):
    file = tmp_path / "trials.json"
    write_answer(answer(GOOD), file)
    assert read_answer(file) == answer(GOOD)
    assert "200 variants" in (fault_of(answer(*[GOOD] * 201)) or "")
    document = json.loads(file.read_text())
    document["baseline"]["median_ms"] = "HUGE"
    file.write_text(json.dumps(document).replace('"HUGE"', "1e999"))
    with pytest.raises(UnusableInput):
        read_answer(file)


def test_losses_stand_side_by_side_where_a_change_trains():
    def with_losses(*pairs: list[float | None], **more: object) -> Variant:
        return changed(parity=Parity(losses=list(pairs)), **more)

    pairs = [[1.0 - 0.01 * number, 1.0 - 0.02 * number] for number in range(40)]
    bound = with_losses(*pairs, bound=True, settings={"ddp.no_sync": True})
    table = tried_view(answer(with_losses(*pairs), with_losses(*pairs[:20], [None, 0.5]), bound)).losses
    assert table is not None
    assert table.head == ["backward", "as it is", "loader.num_workers=4", "loader.num_workers=4"]
    assert [row[0] for row in table.rows] == ["1", "4", "7", "10", "12", "15", "18", "21"]
    assert table.rows[0] == ["1", "1", "1", "1"]
    assert table.rows[-1] == ["21", "0.8", "0.6", "0.5"]
    assert tried_view(answer(GOOD, with_losses())).losses is None
    single = tried_view(answer(with_losses([1.0, None]))).losses
    assert single is not None and single.rows == [["1", "1", ""]]
    diagnosis = msgspec.structs.replace(samples.sick(), tried=answer(with_losses(*pairs)))
    assert "**Losses of rank 0**" in render_markdown(diagnosis)
    assert "Losses of rank 0, backward by backward" in render_html(diagnosis)


def test_a_diagnosis_with_trials_that_cannot_be_is_refused():
    sick = msgspec.structs.replace(samples.minimal(), tried=answer(changed(verdict="?")))
    assert "a verdict" in (sound.fault_of(sick) or "")


def test_markdown_and_the_terminal_show_the_table_below_its_heading():
    refused = changed(verdict="not applied", why="the loader has | no workers", median_ms=12.0)
    diagnosis = msgspec.structs.replace(
        samples.sick(), tried=answer(GOOD, refused, notes=["The time was up."])
    )
    text = render_markdown(diagnosis)
    assert "**Tried on the job itself**" in text
    assert "| as it is |  | 20.0 |  |" in text
    assert "| loader.num\\_workers=4 |  | 10.0 | faster, -50% |" in text
    assert "|  |  | not applied: the loader has \\| no workers |" in text
    assert "The time was up." in text
    out = io.StringIO()
    print_terminal(diagnosis, Console(file=out, width=160))
    assert "Tried on the job itself\n" in out.getvalue().replace(" \n", "\n")
