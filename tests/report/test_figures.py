"""Figures of plotly: the same numbers as the SVG, as data, as objects of plotly, and as files."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.resources
import json
import re
import subprocess
import sys

import msgspec
import pytest
import samples
from packed import unpacked

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.report.charts import series as over_the_run
from ddpdoctor.report.charts.lines import line_data
from ddpdoctor.report.figures.spec import light_colours, text, with_colours
from ddpdoctor.report.figures.specs import (
    BUDGET_BYTES,
    LIBRARY,
    SHA256,
    figure_specs,
    interactive_bundle,
    interactive_data,
)
from ddpdoctor.report.html import page, render_html, write_figures

UNHEALTHY = ["waterfall", "run", "breakdown", "step_times", "lateness", "timeline", "bandwidth"]


def strings(value):
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return [found for item in value for found in strings(item)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("name", ["figures.html", "timeline.json"])
def test_foreign_files_are_not_overwritten(tmp_path, name):
    (tmp_path / name).write_text('{"traceEvents": []}')
    with pytest.raises(DdpDoctorError, match=f"{name} is there and was not written by ddpdoctor"):
        write_figures(samples.unhealthy(), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    (tmp_path / name).unlink()
    assert write_figures(samples.unhealthy(), tmp_path) == write_figures(samples.unhealthy(), tmp_path)


def test_there_is_a_figure_for_each_chart_that_has_numbers():
    assert list(figure_specs(samples.unhealthy())) == [*UNHEALTHY, "telemetry_cpu", "telemetry_memory_used"]
    assert figure_specs(samples.minimal()) == {}
    assert "lateness" not in figure_specs(samples.healthy()), "nobody is late: the report draws no map either"


def test_figures_and_report_show_the_same_numbers():
    diagnosis = samples.unhealthy()
    specs, shown = figure_specs(diagnosis), page(diagnosis)
    lines = {trace["name"]: trace["y"] for trace in specs["step_times"]["data"]}
    assert list(lines)[:2] == [line.name for line in shown.step_times.lines] == ["rank 0", "rank 1"]
    assert list(lines)[2:] == [mark.label for mark in shown.step_times.marks]
    run = {trace["name"]: trace["x"] for trace in specs["run"]["data"]}
    assert run["pauses (steps 50 and 100, train.py:61)"] == [8.0] and len(run) == len(
        shown.whole_run.segments
    )
    assert lines["rank 1"] == pytest.approx(diagnosis.series.step_ms[1], rel=1e-4)
    heat = specs["lateness"]["data"][0]
    assert heat["y"] == ["rank 0", "rank 1"] and heat["x"] == diagnosis.series.steps
    assert heat["z"][1] == pytest.approx(diagnosis.series.late_ms[1], rel=5e-3)
    legend = [f"over {bound:g} ms" for bound in heat["colorbar"]["tickvals"]]
    assert legend == [word.replace("\u00a0", " ") for word in shown.lateness.legend]
    bars = [
        (trace["name"], row, base)
        for trace in specs["timeline"]["data"]
        for row, base in zip(trace["y"], trace["base"], strict=True)
    ]
    assert len(bars) == len(shown.timeline.bars) == len(diagnosis.timeline.spans)
    assert ("waiting for data", "rank 1 host", 0.0) in bars
    parts = {trace["name"]: trace["x"] for trace in specs["breakdown"]["data"]}
    assert parts["waiting for data"] == [0.3, 45.8] and len(parts) == len(shown.breakdown.parts)
    falls = specs["waterfall"]["data"][0]
    assert falls["x"] == [51.4, 44.8, 1.2, 5.4] and falls["base"] == [0.0, 6.6, 5.4, 0.0]
    dots = specs["bandwidth"]["data"][0]
    assert len(dots["x"]) == len(shown.bandwidth.operations[0].dots)


@pytest.mark.extended
def test_many_ranks_become_median_band_and_named_ranks():
    names = [trace["name"] for trace in figure_specs(samples.large())["step_times"]["data"]]
    assert names == [
        "lowest",
        "from the lowest to the highest of 512 ranks",
        "median",
        "rank 137",
        "rank 300",
    ]
    assert len(figure_specs(samples.large())["lateness"]["data"][0]["z"]) == 512


@pytest.mark.parametrize("name", sorted(samples.ALL))
def test_every_number_is_json_and_every_colour_has_a_value(name):
    for spec in figure_specs(samples.ALL[name]()).values():
        json.dumps(spec, allow_nan=False)
        assert not [found for found in strings(with_colours(spec, light_colours())) if "var(" in found]


def test_one_huge_step_does_not_flatten_the_others():
    diagnosis = samples.unhealthy()
    rows = [list(row) for row in diagnosis.series.step_ms]
    rows[0][0] = 5000.0
    series = msgspec.structs.replace(diagnosis.series, step_ms=rows)
    changed = msgspec.structs.replace(diagnosis, series=series)
    low, high = figure_specs(changed)["step_times"]["layout"]["yaxis"]["range"]
    assert low == 0 and 50 < high < 200
    assert "1 point above the chart" in page(changed).step_times.above_label, (
        "the report's drawing does the same"
    )


def test_missing_and_invalid_numbers_stay_gaps():
    diagnosis = samples.unhealthy()
    rows = [list(row) for row in diagnosis.series.step_ms]
    rows[0][3], rows[0][4] = None, float("inf")
    series = msgspec.structs.replace(diagnosis.series, step_ms=rows)
    spec = figure_specs(msgspec.structs.replace(diagnosis, series=series))["step_times"]
    assert spec["data"][0]["y"][2:6].count(None) == 2


def test_names_from_the_job_are_escaped():
    assert text("gemm<float, 4>") == "gemm&lt;float, 4&gt;"
    for spec in figure_specs(samples.hostile()).values():
        ours = re.compile(r"<extra></extra>")
        assert not [found for found in strings(spec) if "<" in ours.sub("", found)]


def test_the_library_is_the_published_file():
    place = importlib.resources.files("ddpdoctor.report.figures").joinpath("library")
    packed = place.joinpath(LIBRARY).read_bytes()
    library = gzip.decompress(packed)
    assert base64.b64encode(hashlib.sha256(library).digest()).decode() == SHA256
    # The integrity that the registry gives of plotly.js-cartesian-dist-min 3.1.0 is of its archive; this is of the file in it.
    assert SHA256 == "xGK0ChpULhbDUz+X05+7uRr09SZ/PL8jvXDXhe/ETDg="
    assert b"plotly.js (cartesian - minified) v3.1.0" in library[:200]
    assert len(packed) <= 450_000, "what the wheel grows by"
    assert "MIT License" in place.joinpath("LICENSE").read_text()


def test_large_figures_are_embedded_with_less_detail():
    small, large = (
        interactive_bundle(interactive_data(each)) for each in (samples.unhealthy(), samples.large())
    )
    assert small.names == large.names == ["step_times", "lateness", "timeline"]
    assert (
        json.loads(unpacked(small.figures))["step_times"]["data"][0]["x"] == samples.unhealthy().series.steps
    )
    assert len(large.figures) <= BUDGET_BYTES
    drawn = json.loads(unpacked(large.figures))
    assert 16 <= len(drawn["lateness"]["data"][0]["z"]) <= 64
    shared = drawn["lateness"]["layout"]["meta"]["rows"]
    assert shared[0][0] == 0 and shared[-1][1] == 511, "which ranks share a row is known"
    assert interactive_bundle(interactive_data(samples.minimal())) is None


def test_a_shared_cell_shows_the_largest_lateness():
    diagnosis = samples.large(ranks=64, points=3000)
    late = [[0.0] * 3000 for _ in range(64)]
    late[40][1500] = 500.0
    series = msgspec.structs.replace(diagnosis.series, late_ms=late)
    heat = json.loads(
        unpacked(
            interactive_bundle(interactive_data(msgspec.structs.replace(diagnosis, series=series))).figures
        )
    )["lateness"]["data"][0]
    assert max(value for row in heat["z"] for value in row) == 500.0
    row = next(row for row in heat["z"] if 500.0 in row)
    at = row.index(500.0)
    assert heat["x"][at] <= 1500 * 25 < (heat["x"] + [75_000])[at + 1]


def test_figures_are_written_as_files(tmp_path):
    files = write_figures(samples.unhealthy(), tmp_path / "new" / "folder")
    assert [file.name for file in files][:3] == ["figures.html", "waterfall.json", "run.json"]
    for file in files[1:]:
        assert set(json.loads(file.read_text())) == {"data", "layout"}
    assert write_figures(samples.minimal(), tmp_path / "none") == [] and not (tmp_path / "none").exists()
    (tmp_path / "file").touch()
    with pytest.raises(DdpDoctorError, match="is a file: name another folder"):
        write_figures(samples.unhealthy(), tmp_path / "file")


def test_file_names_of_quantities_are_sanitized(tmp_path):
    for file in write_figures(samples.hostile(), tmp_path):
        assert file.parent == tmp_path and re.fullmatch(r"[a-z0-9_]+\.(json|html)", file.name)


@pytest.mark.parametrize("name", sorted(samples.ALL))
@pytest.mark.extended
def test_plotly_accepts_the_figures(name, tmp_path):
    go = pytest.importorskip("plotly.graph_objects")
    io = pytest.importorskip("plotly.io")
    figures = samples.ALL[name]().figures()
    assert list(figures) == list(figure_specs(samples.ALL[name]()))
    assert all(isinstance(figure, go.Figure) for figure in figures.values())
    for file in write_figures(samples.ALL[name](), tmp_path)[1:]:
        read = io.read_json(file)
        assert len(read.data) == len(figures[file.stem].data)


def test_without_plotly_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(DdpDoctorError, match=r"pip install plotly"):
        samples.unhealthy().figures()


def test_importing_ddpdoctor_imports_no_plotly():
    code = (
        "import sys, ddpdoctor, ddpdoctor.report; from ddpdoctor.diagnose.diagnosis import Diagnosis; "
        "print(Diagnosis.figures.__annotations__['return'], 'plotly' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "dict[str, go.Figure] False\n"


def test_a_report_gathers_the_numbers_of_its_charts_once(monkeypatch):
    asked = []

    def counted(*arguments):
        asked.append(arguments)
        return line_data(*arguments)

    monkeypatch.setattr(over_the_run, "line_data", counted)
    render_html(samples.unhealthy())
    assert [axes.title for axes, *_ in asked].count("Step times") == 1
