"""``ddpdoctor export`` on real recordings."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import polars as pl
import pytest
from click.testing import CliRunner

from ddpdoctor.cli.main import cli
from ddpdoctor.measure.export import COLLECTIVES, EVENTS, STEPS
from tests.cli.live import TRAINED, live_run
from tests.commands import command
from tests.python import NEEDS_STACKS

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT.parent / "shared" / "traces"
needs_traces = pytest.mark.skipif(not TRACES.exists(), reason="the public traces are not here")


def run(*arguments):
    done = command("export", *arguments)
    return done.returncode, done.stdout, done.stderr


@needs_traces
def test_the_straggler_is_visible_on_the_timeline(tmp_path):
    timeline, folder = tmp_path / "t.json.gz", tmp_path / "tables"
    traces = TRACES / "torchrec" / "sst_sleep_pl_dense_after_backward_2"
    code, out, err = run(traces, "--timeline", timeline, "--parquet", folder, "--csv", folder)
    assert (code, err) == (0, "") and "ui.perfetto.dev" in out
    events = json.loads(gzip.decompress(timeline.read_bytes()))["traceEvents"]
    wait_ms = {
        rank: sum(e["dur"] for e in events if e["pid"] == rank + 1 and e.get("cat") == "comm_wait") / 1e3
        for rank in range(4)
    }
    # Rank 2 sleeps for about a second in each of three steps, and the others wait for it.
    assert wait_ms[2] < 1 and all(3000 < wait_ms[rank] < 3070 for rank in (0, 1, 3))
    assert {e["name"] for e in events if e.get("cat") == "step"} == {"step 4", "step 5", "step 6"}
    findings = [e for e in events if e.get("cat") == "finding"]
    assert any(e["args"]["ranks"] == "rank 2" for e in findings)
    for name, schema in (("steps", STEPS), ("collectives", COLLECTIVES), ("events", EVENTS)):
        table = pl.read_parquet(folder / f"{name}.parquet")
        assert dict(table.schema) == schema and len(table) > 0
        assert pl.read_csv(folder / f"{name}.csv", schema=schema).equals(table)
    work = pl.read_parquet(folder / "events.parquet")
    assert set(work["step"].drop_nulls().unique()) == {4, 5, 6}
    # The culprit's second, blank among the measured work, has its name.
    named = [e for e in events if e["pid"] == 3 and e["name"] == "# running sparse arch"]
    assert max(e["dur"] for e in named) > 1e6 and {e["cat"] for e in named} == {"detail"}
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 3}
    assert {"annotations", "operators"} <= tracks and any(track.startswith("stream ") for track in tracks)
    collectives = pl.read_parquet(folder / "collectives.parquet")
    assert (
        collectives["end_ns"] - collectives["arrival_ns"]
        == collectives["wait_ns"] + collectives["transfer_ns"]
    ).all()
    transfer_ms = collectives.group_by("rank").agg(pl.col("transfer_ns").sum() / 1e6)["transfer_ns"]
    assert all(36 < ms < 38 for ms in transfer_ms)


@needs_traces
def test_steps_can_be_chosen(tmp_path):
    traces = TRACES / "torchrec" / "resnet18"
    code, _, _ = run(traces, "--steps", "2:3", "--timeline", tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_bytes())["traceEvents"]
    numbers = {e["name"] for e in events if e.get("cat") == "step"}
    code_missing, _, err = run(traces, "--steps", "900:902", "--timeline", tmp_path / "none.json")
    assert (code, numbers) == (0, {"step 2"})
    assert code_missing == 2 and "no step from 900 to 901" in err and not (tmp_path / "none.json").exists()


@needs_traces
def test_collectives_that_cannot_be_matched_are_drawn_and_noted(tmp_path):
    code, _, err = run(TRACES / "hta" / "two_of_128_sampled", "--timeline", tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_bytes())["traceEvents"]
    assert code == 0 and "could not be matched" in err
    assert not any(e.get("cat") in ("comm_wait", "comm_transfer") for e in events)
    assert any(e["name"].endswith("not matched") for e in events)


@NEEDS_STACKS
def test_a_recorded_run_shows_waiting_ranks(once, tmp_path):
    recorded = live_run(once).run
    code, _, err = run(recorded, "--timeline", tmp_path / "t.json", "--parquet", tmp_path / "tables")
    assert code == 0, err
    steps = pl.read_parquet(tmp_path / "tables" / "steps.parquet")
    assert steps["rank"].unique().sort().to_list() == [0, 1] and len(steps) == 2 * TRAINED
    gradients = pl.read_parquet(tmp_path / "tables" / "collectives.parquet").filter(kind="gradients", rank=0)
    # Rank 1 reads from slow storage, 25 ms a step; rank 0 waits for it.
    assert gradients["wait_ns"].median() > 15e6
    events = json.loads((tmp_path / "t.json").read_bytes())["traceEvents"]
    assert {e["name"] for e in events if e["ph"] == "X" and e["pid"] == 2} >= {"waiting for data", "forward"}
    sampled = {e["name"] for e in events if e.get("cat") == "detail" and e["pid"] == 2}
    assert any("read_from_slow_storage" in name for name in sampled)
    counted = {e["name"].partition(": ")[2] for e in events if e["ph"] == "C"}
    assert {"cpu", "memory used"} <= counted
    assert any(e.get("cat") == "finding" for e in events)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "nothing to write"),
        (["nowhere", "--timeline", "t.json"], "nowhere"),
        (["nowhere", "--timeline", "t.json", "--steps", "7"], "not a range of steps"),
        (["nowhere", "--timeline", "t.json", "--steps", "7:3"], "not a range of steps"),
    ],
)
def test_wrong_input_is_one_sentence_and_2(tmp_path, arguments, sentence):
    code, _, err = run(*arguments)
    assert code == 2 and sentence in err and "Traceback" not in err


def test_figures_of_a_recording_and_of_its_report(tmp_path):
    recording = ROOT / "fixtures" / "slow-data-one-rank"
    code, out, err = run(recording, "--figures", tmp_path / "of-run", "--csv", tmp_path / "tables")
    assert code == 0, err
    names = {file.name for file in (tmp_path / "of-run").iterdir()}
    assert {"figures.html", "step_times.json", "lateness.json", "timeline.json", "breakdown.json"} <= names
    assert "figures.html" in out and (tmp_path / "tables" / "steps.csv").exists()
    assert command("analyze", "-q", recording, "--json", tmp_path / "d.json").returncode == 0
    code, _, err = run(tmp_path / "d.json", "--figures", tmp_path / "of-json", "--redact")
    assert code == 0, err
    assert {file.name for file in (tmp_path / "of-json").iterdir()} == names
    spec = json.loads((tmp_path / "of-json" / "lateness.json").read_text())
    assert spec["data"][0]["y"] == ["rank 0", "rank 1"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--redact", "--csv", "x"], "--redact is for figures and trackers"),
        (["--figures", "x", "--steps", "1:5"], "--steps has no effect on figures and trackers"),
        ([], "nothing to write"),
    ],
)
def test_exclusive_options_are_refused(options, sentence, tmp_path):
    code, _, err = run(ROOT / "fixtures" / "slow-data-one-rank", *options)
    assert code == 2 and sentence in " ".join(err.split())


def test_tables_and_flame_graphs_need_no_diagnosis(tmp_path, monkeypatch):
    monkeypatch.setattr("ddpdoctor.analysis.conclude", None)
    arguments = ["--csv", str(tmp_path / "csv"), "--speedscope", str(tmp_path / "flames")]
    done = CliRunner().invoke(cli, ["export", str(ROOT / "fixtures" / "healthy"), *arguments])
    assert done.exception is None and (tmp_path / "csv" / "steps.csv").exists()
