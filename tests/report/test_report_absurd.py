"""Impossible diagnoses are refused in one sentence; charts accept numbers of any size."""

from __future__ import annotations

import itertools
import os
import resource
import subprocess
import sys

import msgspec
import pytest

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.errors import UnusableInput
from ddpdoctor.report.charts.scale import index_ticks
from ddpdoctor.report.figures.spec import light_colours, with_colours
from ddpdoctor.report.figures.specs import figure_specs
from ddpdoctor.report.html import render_html
from ddpdoctor.report.json_output import to_json
from ddpdoctor.report.read import read_diagnosis
from tests.fuzz.trial import fault_of_page, faults_of_figure
from tests.report import samples


def changed(**fields):
    """The sample as a document with fields replaced: ``a__b`` is field ``b`` of ``a``, a number an item of a list."""
    document = msgspec.json.decode(to_json(samples.unhealthy()))
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
        ({"job__ranks_seen": [0, 2**40]}, "a rank below 0 or above 10 million"),
        ({"findings__0__ranks": [-1]}, "a rank below 0 or above 10 million"),
        ({"job__world_size": 10**12}, "job.world_size below 0 or above 10 million"),
        ({"steps__median_ms": 1e300}, "median_ms: a number out of range"),
        ({"steps__count": -5}, "steps: a count below 0"),
        ({"findings__0__coverage__ranks": -1}, "findings: a coverage below 0"),
        ({"created_ns": 2**63}, "created_ns: a number out of range"),
        ({"series__steps": [5, 3]}, "series.step_ms does not have one number for each rank and step"),
        ({"series__step_ms__0": [1.0]}, "series.step_ms does not have one number for each rank and step"),
        ({"breakdown": {"compute": 5.0}}, "breakdown: a share that is not between 0 and 1"),
        ({"facts": {"steps": {"mean_ms": 10**40}}}, "mean_ms: a number out of range"),
        ({"hta": {"x": msgspec.Raw(b"[" * 60 + b"]" * 60)}}, "x: nested too deeply"),
        ({"findings__0__title": "y" * 1_000_000}, "title: a text of more than 262,144 characters"),
        ({"facts": {"y" * 1_000_000: 1}}, "facts: a text of more than 262,144 characters"),
        ({"notes": ["y" * 250_000] * 150}, "all texts together have more than 33,554,432 characters"),
        ({"notes": ["y"] * 100_000}, "notes: a list of more than 10,000 entries"),
        ({"job__environment": {str(n): "" for n in range(10_001)}}, "environment: more than 10,000 entries"),
        ({"breakdown": {str(n): 0.001 for n in range(101)}}, "a breakdown of more than 100 parts"),
        ({"steps__median_ms": 1e308}, "median_ms: a number out of range"),
        ({"steps__median_ms": "Infinity"}, r"Expected `float \| null`, got `str` .*"),
    ],
)
def test_impossible_values_are_refused_in_one_sentence(tmp_path, fields, words):
    file = tmp_path / "d.json"
    file.write_bytes(changed(**fields))
    with pytest.raises(UnusableInput, match=f"^{file}: the diagnosis does not follow .*{words}$"):
        read_diagnosis(file)


def test_negligible_numbers_become_zero(tmp_path):
    (tmp_path / "d.json").write_bytes(
        changed(
            steps__median_ms=5e-324,
            series__step_ms__0__3=-0.0,
            facts={"a": [1e-300]},
            findings__0__coverage__steps=0,
        )
    )
    read = read_diagnosis(tmp_path / "d.json")
    assert repr([read.steps.median_ms, read.series.step_ms[0][3], read.facts["a"][0]]) == "[0.0, 0.0, 0.0]"
    unchanged = samples.unhealthy()
    assert read.series.late_ms == unchanged.series.late_ms and read.tried == unchanged.tried


@pytest.mark.parametrize("factor", [5e-324, 1e-310, 1e-200, 1e-90, 0.0, -1.0, 1e15])
def test_charts_accept_numbers_of_any_size(factor):
    """Also without validation, which only diagnoses from files have."""
    document = msgspec.to_builtins(samples.unhealthy())
    for name in ("series", "timeline", "flames", "waterfall", "bandwidth", "telemetry", "ranks", "steps"):
        document[name] = scaled(document[name], factor)
    diagnosis = msgspec.convert(document, Diagnosis)
    assert fault_of_page(render_html(diagnosis)) is None
    for spec in figure_specs(diagnosis).values():
        assert next(faults_of_figure(with_colours(spec, light_colours())), None) is None


def scaled(value, factor):
    if isinstance(value, dict):
        return {key: scaled(item, factor) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scaled(item, factor) for item in value]
    return value * factor if isinstance(value, float) else value


@pytest.mark.extended
def test_long_texts_take_linear_time(tmp_path):
    """250,000 characters in each text; quadratic patterns took minutes."""
    pieces = itertools.cycle(["/a b", "'/", "`", "a@", "1.2.3.4 ", "é_", "\x1b", "x\n\n"])
    document = msgspec.json.decode(to_json(samples.unhealthy()))
    for holder, key in texts(document):
        holder[key] = next(pieces) * 2_000
    finding = document["findings"][0]
    document["verdict"]["headline"] = finding["title"] = "_a." * 80_000
    finding["explanation"] = "\u00a0 " * 120_000
    finding["limits"] = f"http://{'.' * 240_000}x"
    document["telemetry"][0]["unit"] = f".{'0' * 240_000}1"
    document["notes"] = [" ".join(f"/home/u{n}x/" for n in range(15_000)), "'/" * 120_000, "`a" * 120_000]
    (tmp_path / "d.json").write_bytes(msgspec.json.encode(document))
    for chosen in ("--verbose", "--redact"):
        command = [
            "analyze",
            "d.json",
            chosen,
            "--html",
            "r.html",
            "--markdown",
            "r.md",
            "--sarif",
            "s",
            "--junit",
            "j",
        ]
        program = f"import sys; sys.argv[1:] = {command!r}; from ddpdoctor.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            capture_output=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (60, 61)),
        )
        assert done.returncode == 0, (chosen, done.returncode, done.stderr[-500:])
    assert len(done.stdout) < 1_000_000


def texts(value):
    """(Container, key) of each free text."""
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(item, dict | list):
            yield from texts(item)
        elif isinstance(item, str) and key not in ("schema", "verdict", "tool_version"):
            yield value, key


@pytest.mark.parametrize(
    ("name", "many"),
    [
        ("findings", lambda one, n: {**one, "rule": f"a/b{n}", "ranks": [n]}),
        ("notes", lambda _, n: f"Note {n}."),
        ("skipped", lambda one, n: {**one, "rule": f"a/b{n}"}),
        ("waterfall", lambda one, n: {**one, "rule": f"a/b{n}"} if n else one),
    ],
)
def test_very_long_lists_are_cut_with_a_sentence(name, many):
    document = msgspec.to_builtins(samples.unhealthy())
    document[name] = [many(document[name][0], n) for n in range(2_000)]
    page = render_html(msgspec.convert(document, Diagnosis))
    said = {"findings": "1,500 more findings in the report", "notes": "1,500 more notes in the report"}
    said |= {"skipped": "2,000 checks lacked data", "waterfall": "1,951 more"}
    assert said[name] in page and len(page) < 10_000_000


@pytest.mark.extended
def test_any_number_of_ranks():
    unhealthy = samples.unhealthy()
    one = unhealthy.ranks[1]
    count = 50_000
    ranks = [msgspec.structs.replace(one, rank=n, host=f"node{n}") for n in range(count)]
    job = msgspec.structs.replace(
        unhealthy.job, ranks_seen=list(range(0, 2 * count, 2)), hosts=[f"node{n}" for n in range(count)]
    )
    found = msgspec.structs.replace(unhealthy.findings[0], ranks=job.ranks_seen)
    page = render_html(msgspec.structs.replace(unhealthy, ranks=ranks, job=job, findings=[found]))
    assert "126 and 49,936 more" in page and len(page) < 20_000_000


def test_special_files_are_not_waited_for(tmp_path):
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
def test_an_axis_with_any_start_has_a_few_ticks(numbers):
    assert 1 <= len(index_ticks(numbers)) <= 12


def test_a_report_of_late_steps_terminates():
    unhealthy = samples.unhealthy()
    late = [number + 10**15 for number in unhealthy.series.steps]
    moved = msgspec.structs.replace(unhealthy, series=msgspec.structs.replace(unhealthy.series, steps=late))
    assert "1,000,000,000,0" in render_html(moved)
