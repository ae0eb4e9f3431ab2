"""An offline run of Weights & Biases, written by its own package without any network, has all of it in its file."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.analysis import analyze
from ddpdoctor.trackers.contents import tracker_run

from .exporting import RUN, export, names_left

pytest.importorskip("wandb")
pytestmark = pytest.mark.slow

_BLOCK_BYTES, _HEAD_BYTES = 32768, 7
_FULL, _LAST = 1, 4


def records(folder: Path) -> Iterator[object]:
    """Of the one run below ``folder``: LevelDB's log format, https://github.com/google/leveldb/blob/main/doc/log_format.md"""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.rglob("*.wandb")
    data, place, whole = file.read_bytes(), _HEAD_BYTES, b""
    assert data.startswith(b":W&B")
    while place + _HEAD_BYTES <= len(data):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _HEAD_BYTES:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + _HEAD_BYTES : place + _HEAD_BYTES + length]
        place += _HEAD_BYTES + length
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def items(updates) -> dict[str, object]:
    return {"/".join(each.nested_key) or each.key: json.loads(each.value_json) for each in updates}


def test_the_run_is_there_with_history_summary_verdict_and_report(tmp_path):
    diagnosis = analyze([str(RUN)])
    expected = tracker_run(diagnosis)
    done = export(tmp_path, "--wandb", "offline")
    assert "not uploaded" in done.stdout
    assert f"wandb sync {tmp_path}/offline/wandb/offline-run-" in done.stdout
    found = list(records(tmp_path / "offline"))
    (run,) = [each.run for each in found if each.WhichOneof("record_type") == "run"]
    assert (run.project, run.display_name) == ("ddpdoctor", RUN.name)
    assert diagnosis.verdict.headline[:20] in run.notes
    assert list(run.tags) == [diagnosis.verdict.rule]
    config = items(run.config.update)
    assert {name: config[name] for name in expected.params} == expected.params
    rows = [items(each.history.item) for each in found if each.WhichOneof("record_type") == "history"]
    curve = next(each for each in expected.curves if each.name == "step_ms" and each.source == "rank_00001")
    here = {
        row["_step"]: row[f"{curve.source}/{curve.name}"]
        for row in rows
        if f"{curve.source}/{curve.name}" in row
    }
    assert list(here) == curve.steps
    assert list(here.values()) == pytest.approx(curve.values)
    summary: dict[str, object] = {}
    for each in found:
        if each.WhichOneof("record_type") == "summary":
            summary |= items(each.summary.update)
    for name, value in expected.metrics.items():
        assert summary[name] == pytest.approx(value), name
    (report,) = [each.artifact for each in found if each.WhichOneof("record_type") == "artifact"] or [
        each.request.log_artifact.artifact
        for each in found
        if each.request.WhichOneof("request_type") == "log_artifact"
    ]
    assert {entry.path for entry in report.manifest.contents} == {"report.html", "diagnosis.json"}
    kinds = Counter(each.WhichOneof("record_type") for each in found)
    assert not kinds["stats"], "nothing was read of this machine"


def test_redacted_no_name_goes_along(tmp_path):
    assert not names_left(tmp_path, "--wandb", "out", "--redact", WANDB_PROJECT="ours")
    (run,) = [each.run for each in records(tmp_path / "out") if each.WhichOneof("record_type") == "run"]
    assert run.project == "ours"
    assert run.host in ("", "ddpdoctor")


def test_the_job_s_own_run_is_left_alone(tmp_path):
    """Where the environment is still that of the training script, `wandb sync` would put the diagnosis into its run."""
    done = export(tmp_path, "--wandb", "out", WANDB_RUN_ID="theirs", WANDB_RESUME="allow", WANDB_SWEEP_ID="s")
    (run,) = [each.run for each in records(tmp_path / "out") if each.WhichOneof("record_type") == "run"]
    assert run.run_id and run.run_id != "theirs" and not run.sweep_id
    assert "theirs" not in done.stdout
