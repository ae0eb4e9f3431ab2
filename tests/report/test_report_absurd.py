"""A diagnosis that no analysis can have found is refused in one sentence; numbers far from zero do not keep a chart."""

from __future__ import annotations

import os

import msgspec
import pytest

from ddpdoctor.errors import UnusableInput
from ddpdoctor.report import read_diagnosis, render_html, to_json
from ddpdoctor.report.charts.scale import index_ticks
from tests.report import samples


def changed(**fields):
    """The sample as a document with fields replaced: ``a__b`` is field ``b`` of ``a``, a number an item of a list."""
    document = msgspec.json.decode(to_json(samples.sick()))
    for path, value in fields.items():
        *places, last = (int(name) if name.isdecimal() else name for name in path.split("__"))
        inside = document
        for place in places:
            inside = inside[place]
        inside[last] = value
    return msgspec.json.encode(document)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"job__ranks_seen": [0, 2**40]}, "a rank below 0 or beyond ten million"),
        ({"findings__0__ranks": [-1]}, "a rank below 0 or beyond ten million"),
        ({"job__world_size": 10**12}, "job.world_size below 0 or beyond ten million"),
        ({"steps__median_ms": 1e300}, "median_ms: a number out of range"),
        ({"steps__count": -5}, "steps: a count below 0"),
        ({"created_ns": 2**63}, "created_ns: a number out of range"),
        ({"series__steps": [5, 3]}, "series.step_ms does not have one number for each rank and step"),
        ({"series__step_ms__0": [1.0]}, "series.step_ms does not have one number for each rank and step"),
        ({"breakdown": {"compute": 5.0}}, "breakdown: a share that is not between 0 and 1"),
        ({"facts": {"steps": {"mean_ms": 10**40}}}, "mean_ms: a number out of range"),
        ({"hta": {"x": msgspec.Raw(b"[" * 60 + b"]" * 60)}}, "x: nested too deep"),
    ],
)
def test_absurd_values_are_one_sentence(tmp_path, fields, words):
    file = tmp_path / "d.json"
    file.write_bytes(changed(**fields))
    with pytest.raises(UnusableInput, match=f"^{file}: the diagnosis does not follow .*{words}$"):
        read_diagnosis(file)


@pytest.mark.parametrize("name", sorted(samples.ALL))
def test_what_we_write_is_sound(tmp_path, name):
    (tmp_path / "d.json").write_bytes(to_json(samples.ALL[name]()))
    read_diagnosis(tmp_path / "d.json")


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "d.json")
    (tmp_path / "e.json").symlink_to("/dev/zero")
    for name in ("d.json", "e.json"):
        with pytest.raises(UnusableInput, match="it is no regular file"):
            read_diagnosis(tmp_path / name)


@pytest.mark.parametrize(
    "numbers",
    [
        [10**12, 10**12 + 100],
        [10**15, 10**15 + 1],
        [2**53, 2**53 + 7],
        [-(10**12), 5],
        [1e-300, 1e-299],
        [0.0, 1e300],
    ],
)
def test_an_axis_that_begins_anywhere_has_a_few_ticks(numbers):
    assert 1 <= len(index_ticks(numbers)) <= 12


def test_a_report_of_late_steps_ends():
    sick = samples.sick()
    late = [number + 10**15 for number in sick.series.steps]
    moved = msgspec.structs.replace(sick, series=msgspec.structs.replace(sick.series, steps=late))
    assert "1,000,000,000,0" in render_html(moved)
