"""TensorBoard's own reader finds the numbers and the words in what was written."""

from __future__ import annotations

import json
import shutil
import socket

import msgspec
import pytest

from ddpdoctor.report.markdown import render_markdown
from ddpdoctor.trackers.contents import tracker_run
from ddpdoctor.trackers.to_tensorboard import write_tensorboard
from tests.report import samples

from .exporting import RUN, export, mentions, names_left

pytest.importorskip("tensorboard")
pytestmark = pytest.mark.extended


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def test_each_rank_is_a_run_with_its_steps(tmp_path):
    run = tracker_run(samples.unhealthy())
    files = write_tensorboard(run, tmp_path)
    for curve in run.curves:
        scalars = read(tmp_path / run.name / curve.source).Scalars(curve.name)
        assert [each.step for each in scalars] == curve.steps
        assert [each.value for each in scalars] == pytest.approx(curve.values)
    top = read(tmp_path / run.name)
    assert top.Scalars("step/median_ms")[0].value == pytest.approx(run.metrics["step/median_ms"])
    assert not [file for file in files if socket.gethostname() in file.name]
    assert write_tensorboard(run, tmp_path) == files, "a second export takes the first one's place"
    assert len(list(tmp_path.rglob("*tfevents*"))) == len(files)


@pytest.mark.parametrize("started", [True, False])
def test_another_recording_of_the_same_name_takes_no_files_away(tmp_path, started):
    """Neither those of a job that started at another time, nor of traces, which do not say when theirs did."""
    first = samples.unhealthy()
    job = msgspec.structs.replace(first.job, started_ns=1 if started else None)
    first = msgspec.structs.replace(first, job=job, source=["/jobs/a/traces"])
    job = msgspec.structs.replace(first.job, started_ns=2 if started else None)
    second = msgspec.structs.replace(first, job=job, source=["/jobs/b/traces"])
    one, two = (write_tensorboard(tracker_run(each), tmp_path) for each in (first, second))
    assert (one[0].parent.name, two[0].parent.name) == ("traces", "traces-2")
    assert write_tensorboard(tracker_run(first), tmp_path) == one
    assert write_tensorboard(tracker_run(second), tmp_path) == two
    assert {*tmp_path.rglob("*tfevents*")} == {*one, *two}


def test_the_verdict_and_the_findings_are_text(tmp_path):
    from tensorboard.util import tensor_util

    diagnosis = samples.unhealthy()
    run = tracker_run(diagnosis)
    write_tensorboard(run, tmp_path)
    found = read(tmp_path / run.name)
    texts = {
        tag: tensor_util.make_ndarray(found.Tensors(tag)[0].tensor_proto)[0].decode()
        for tag in found.Tags()["tensors"]
    }
    assert texts["verdict"] == render_markdown(diagnosis)
    assert texts[f"findings/01 {diagnosis.findings[0].rule}"].startswith(
        f"### {diagnosis.findings[0].title}"[:20]
    )
    assert found.PluginTagToContent("text").keys() == texts.keys()


def test_a_recording_is_exported_by_the_command(tmp_path):
    done = export(tmp_path, "--tensorboard", "tb")
    assert "tensorboard --logdir tb" in done.stdout
    assert mentions(tmp_path / "tb" / RUN.name, "job.py")


def test_a_timeline_on_standard_output_stays_alone(tmp_path):
    done = export(tmp_path, "--tensorboard", "tb", "--timeline", "-")
    assert json.loads(done.stdout)["traceEvents"]
    assert "tensorboard --logdir tb" in done.stderr


def test_redacted_no_name_goes_along(tmp_path):
    assert names_left(tmp_path, "--tensorboard", "out")
    shutil.rmtree(tmp_path / "out")
    assert not names_left(tmp_path, "--tensorboard", "out", "--redact")
    assert mentions(tmp_path / "out", "tfevents")
