"""Where the wall time of a running job went so far."""

import json
import shutil
import time
from pathlib import Path

import pytest

from ddpdoctor.telemetry.live import LiveRun
from ddpdoctor.telemetry.prometheus import run_so_far

FIXTURES = Path(__file__).parents[2] / "fixtures"
START_NS = 1_700_000_000_000_000_000
PREPARED_MS, USUAL_MS, PAUSE_MS = 4000, 100, 6000


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A job of two ranks that starts for 5 s and prepares for 4 s; then steps of 100 ms; step 20 takes 6 s longer."""
    manifest = {"schema": "ddpdoctor.run/1", "started_ns": START_NS}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(time, "time_ns", lambda: START_NS + 25 * 10**9)
    write_ranks(tmp_path, steps=50)
    return tmp_path


def write_ranks(folder, steps, **of_rank):
    for rank in range(2):
        (place := folder / "ranks" / f"{rank:05d}").mkdir(parents=True, exist_ok=True)
        joined_ns = START_NS + 5 * 10**9
        document = {"rank": rank, "host": "ab"[rank], "pid": 1, "started_ns": joined_ns, **of_rank}
        (place / "rank.json").write_text(json.dumps(document))
        lines, at = [], joined_ns
        for number in range(steps):
            end = at + (USUAL_MS + {0: PREPARED_MS, 20: PAUSE_MS}.get(number, 0)) * 10**6
            lines.append(json.dumps({"step": number, "t": [at, end], "thin": True}))
            at = end
        (place / "steps.jsonl").write_text("".join(f"{line}\n" for line in lines))


def looked(path):
    run = LiveRun(path)
    run.update()
    return run


def test_the_parts_add_up_to_the_time_until_now(job):
    found = run_so_far(looked(job))
    # 5 s of start, 4 s of preparation, 50 steps, a pause of 6 s; since then 5 s without a step.
    assert found.wall_s == pytest.approx(25.0)
    assert found.parts_s == {
        "start": pytest.approx(5.0),
        "preparation": pytest.approx(4.0, rel=0.01),
        "steps": pytest.approx(5.0, rel=0.01),
        "other": pytest.approx(11.0, rel=0.01),
    }
    assert found.goodput == pytest.approx(0.2, rel=0.01)


def test_what_follows_the_last_step_of_an_ended_job_is_its_end(job):
    manifest = {"schema": "ddpdoctor.run/1", "started_ns": START_NS, "ended_ns": START_NS + 23 * 10**9}
    (job / "manifest.json").write_text(json.dumps(manifest))
    parts_s = run_so_far(looked(job)).parts_s
    assert parts_s["end"] == pytest.approx(3.0) and parts_s["other"] == pytest.approx(6.0, rel=0.01)


def test_before_the_first_step_a_job_prepares(job):
    write_ranks(job, steps=0)
    found = run_so_far(looked(job), "a")
    assert found.parts_s == {"start": pytest.approx(5.0), "preparation": pytest.approx(20.0)}
    assert found.goodput == 0.0


def test_the_start_of_a_restarted_rank_includes_the_attempts_before(job):
    write_ranks(job, steps=50, attempt=1)
    assert run_so_far(looked(job)).parts_s["earlier_attempts"] == pytest.approx(5.0)


def test_nothing_is_said_without_a_start_or_a_rank(job):
    assert run_so_far(looked(job), "c") is None
    (job / "manifest.json").unlink()
    assert run_so_far(looked(job)) is None


def test_of_a_long_backlog_the_parts_still_add_up(job, monkeypatch):
    monkeypatch.setattr("ddpdoctor.telemetry.live.LOOK_BYTES", 1000)
    found = run_so_far(looked(job))
    assert sum(found.parts_s.values()) == pytest.approx(25.0)
    assert "preparation" not in found.parts_s and found.goodput == pytest.approx(0.2, rel=0.01)


def test_a_clock_that_was_set_gives_no_negative_time(job, monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: START_NS + 6 * 10**9)
    parts_s = run_so_far(looked(job)).parts_s
    assert sum(parts_s.values()) == pytest.approx(6.0) and min(parts_s.values()) > 0
    monkeypatch.setattr(time, "time_ns", lambda: START_NS - 10**9)
    assert run_so_far(looked(job)) is None


def test_it_agrees_with_the_account_of_the_recorded_run(tmp_path):
    import ddpdoctor

    run = shutil.copytree(FIXTURES / "slow-data-one-rank", tmp_path / "run")
    found, account = run_so_far(looked(run)), ddpdoctor.analyze(run).facts["run"]
    assert found is not None and account["wall_s"] is not None
    assert found.wall_s == pytest.approx(account["wall_s"], rel=0.02)
    assert found.goodput == pytest.approx(account["goodput"], abs=0.05)
