"""The public API of ``import ddpdoctor``: results, types, and its documentation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

import ddpdoctor
from ddpdoctor.diagnose.diagnosis import without_numpy
from ddpdoctor.errors import UnusableInput

ROOT = Path(__file__).parents[1]
RUN = ROOT / "fixtures" / "slow-data-one-rank"
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")

SCRIPT = """
import polars as pl

import ddpdoctor

diagnosis = ddpdoctor.analyze(["a", "b"], rules=["ours"], job=1, redact=True, engine="dask")
headline: str = diagnosis.verdict.headline
costs: list[float | None] = [finding.costs_ms_per_step for finding in diagnosis.findings]
for finding in diagnosis.findings:
    for row in finding.evidence:
        if isinstance(row.value, float):
            costs.append(row.value)
steps = diagnosis.facts["steps"]
if isinstance(steps, dict):
    mean = steps.get("mean_ms")
backend: str | None = diagnosis.job.backend
for rank in diagnosis.ranks:
    late: float | None = rank.late_ms
comparison = ddpdoctor.compare(diagnosis, "after")
percent: float | None = comparison.regression_percent()
html: str = ddpdoctor.to_html(diagnosis)
text: str = ddpdoctor.to_json(diagnosis)
frames = ddpdoctor.frames("a", job=2)
rows: pl.DataFrame = frames.collectives.filter(pl.col("rank") == 0)
count: int = frames.ranks.height + frames.steps.height + frames.events.height
ddpdoctor.step()
"""


@pytest.fixture(scope="module")
def diagnosis():
    return ddpdoctor.analyze(RUN)


def strict_mypy(tmp_path, *scripts):
    """Run mypy --strict on scripts outside the checkout, with the package as installed."""
    pytest.importorskip("mypy")
    files = [f"script{number}.py" for number in range(len(scripts))]
    for file, script in zip(files, scripts, strict=True):
        (tmp_path / file).write_text(script)
    cache = str(tmp_path.parent / "mypy-cache")
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--disallow-any-expr", "--cache-dir", cache, *files],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.extended
def test_a_script_passes_strict_mypy_without_any(tmp_path):
    done = strict_mypy(tmp_path, SCRIPT)
    assert done.returncode == 0, done.stdout


@pytest.mark.extended
def test_wrong_names_and_types_are_found(tmp_path):
    wrong = SCRIPT + "count = diagnosis.headline\nddpdoctor.analyse('a')\nddpdoctor.analyze('a', job='1')\n"
    done = strict_mypy(tmp_path, wrong)
    lines = re.findall(r"script0.py:(\d+): error: .*\[(attr-defined|arg-type)\]", done.stdout)
    first = SCRIPT.count("\n") + 1
    assert {int(line) for line, _ in lines} == {first, first + 1, first + 2}


def foreign(value, place="diagnosis"):
    """Paths of values whose types are not built into Python."""
    if isinstance(value, msgspec.Struct) or is_dataclass(value):
        names = (
            value.__struct_fields__ if isinstance(value, msgspec.Struct) else [f.name for f in fields(value)]
        )
        return [bad for name in names for bad in foreign(getattr(value, name), f"{place}.{name}")]
    if isinstance(value, dict):
        return [
            bad
            for key, item in value.items()
            for bad in (*foreign(key, place), *foreign(item, f"{place}[{key!r}]"))
        ]
    if isinstance(value, list | tuple):
        return [bad for item in value for bad in foreign(item, f"{place}[]")]
    own = isinstance(value, bool | int | float | str) and not isinstance(value, np.generic)
    return [] if own or value is None else [f"{place}: {type(value).__name__}"]


@pytest.mark.parametrize("name", ["slow-data-one-rank", "healthy", "barrier"])
def test_all_values_of_a_diagnosis_are_python_types(name):
    assert foreign(ddpdoctor.analyze(ROOT / "fixtures" / name)) == []


def test_numpy_values_are_converted_at_any_depth(diagnosis):
    assert without_numpy(diagnosis) is diagnosis
    odd = msgspec.structs.replace(
        diagnosis, breakdown={"data": np.float64(0.5)}, facts={"a": [{"b": np.int64(3)}], "c": np.arange(2)}
    )
    plain = without_numpy(odd)
    assert foreign(plain) == [] and plain.facts == {"a": [{"b": 3}], "c": [0, 1]}
    assert plain.findings is diagnosis.findings


def test_a_repr_is_one_short_line(diagnosis):
    assert re.fullmatch(
        r"<Diagnosis: Rank 1 waits .+ \(\d findings?, \d+ of 100 steps measured\)>", repr(diagnosis)
    )
    assert re.fullmatch(
        r"<Finding dataloader/[\w-]+: critical, [\d.]+ ms per step, of 1 of the ranks>",
        repr(diagnosis.findings[0]),
    )


def test_analyze_takes_paths_lists_and_reports(diagnosis, tmp_path):
    assert ddpdoctor.analyze([str(RUN)]).verdict == diagnosis.verdict
    report = tmp_path / "report.html"
    report.write_text(ddpdoctor.to_html(diagnosis))
    assert ddpdoctor.analyze(report).created_ns == diagnosis.created_ns
    assert json.loads(ddpdoctor.to_json(diagnosis))["verdict"]["headline"] == diagnosis.verdict.headline
    with pytest.raises(UnusableInput):
        ddpdoctor.analyze(tmp_path / "missing")


def test_redacted_has_no_host(diagnosis):
    assert "host1" in ddpdoctor.to_json(diagnosis)
    assert "host1" not in ddpdoctor.to_json(ddpdoctor.analyze(RUN, redact=True))


def test_additional_rules_are_used(tmp_path):
    rule = tmp_path / "ours" / "always.yaml"
    rule.parent.mkdir()
    text = (ROOT / "rules" / "sync" / "explicit-barrier.yaml").read_text()
    rule.write_text(text.replace("id: sync/explicit-barrier", "id: ours/always"))
    found = ddpdoctor.analyze(RUN, rules=[tmp_path])
    assert "ours/always" in {each.rule for each in (*found.findings, *found.checked, *found.skipped)}


def test_compare_takes_paths_and_diagnoses(diagnosis):
    comparison = ddpdoctor.compare(ROOT / "fixtures" / "healthy", diagnosis)
    assert comparison.after.headline == diagnosis.verdict.headline
    assert comparison.judgement in ("faster", "slower", "no clear difference", "not comparable")
    assert repr(comparison) == f"<Comparison: {comparison.verdict.removesuffix('.')}>"


def test_frames_have_steps_collectives_and_ranks_that_add_up():
    frames = ddpdoctor.frames(RUN)
    assert frames.steps["rank"].unique().sort().to_list() == [0, 1]
    assert frames.collectives.filter(frames.collectives["wait_ns"] > 0).height > 50
    ranks = frames.ranks
    assert ranks["rank"].to_list() == [0, 1] and ranks["late_ms"][1] > 10
    parts = [name for name in ranks.columns if name.endswith("_ms")]
    parts = [name for name in parts if name not in ("step_ms", "late_ms", "caused_wait_ms")]
    total = ranks.select(parts).sum_horizontal()
    assert total.to_list() == pytest.approx(ranks["step_ms"].to_list(), rel=0.01)
    assert re.fullmatch(r"<Frames: rows of steps [\d,]+, .*, ranks 2>", repr(frames))


def test_frames_need_no_costs_and_no_diagnosis(monkeypatch):
    for name in ("ddpdoctor.measure.flow.price_all", "ddpdoctor.analysis.driver.diagnose"):
        monkeypatch.setattr(name, None)
    assert ddpdoctor.frames(RUN).ranks.height == 2


def test_the_page_names_every_function_with_its_arguments():
    listed = dict(re.findall(r"^\| `(\w+)\(([^`]*)\)`", PAGE, re.MULTILINE))
    assert set(listed) == set(ddpdoctor.__all__)
    for name, arguments in listed.items():
        known = ddpdoctor.__dict__[name].__annotations__
        assert {part.partition("=")[0].strip() for part in arguments.split(",") if part} == set(known) - {
            "return"
        }


@pytest.mark.extended
def test_the_scripts_of_the_page_pass_strict_mypy(tmp_path):
    scripts = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = strict_mypy(tmp_path, *scripts)
    assert scripts and done.returncode == 0, done.stdout
