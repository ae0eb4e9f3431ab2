"""The account of a run: its parts add up to the wall time, and each second is in the part where it was planted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from ddpdoctor.analysis import Options, analyze
from ddpdoctor.measure.places import Where
from ddpdoctor.measure.runfacts import RunFacts
from ddpdoctor.measure.sourcelines import LogSourceLines
from ddpdoctor.measure.steplog import Event, RankLog, Step, select_steps
from ddpdoctor.measure.wholerun import Launch, RunPart, run_account, run_facts
from ddpdoctor.rundir.reader import RankRecord
from tests.measure.recorded import Job, record

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
MS, S = 1_000_000, 1_000_000_000


@pytest.mark.parametrize(
    "fixture", sorted(FIXTURES.glob("*/manifest.json")), ids=lambda path: path.parent.name
)
def test_the_parts_of_a_recorded_run_are_its_wall_time(fixture: Path) -> None:
    manifest = json.loads(fixture.read_text())
    facts = analyze(str(fixture.parent), Options(cache=False, jobs=1)).facts["run"]
    wall_s = (manifest["ended_ns"] - manifest["started_ns"]) / 1e9
    parts = [
        value
        for name, value in facts.items()
        if name.endswith("_s") and name not in ("wall_s", "joining_s", "exit_s") and value is not None
    ]
    assert facts["wall_s"] == pytest.approx(wall_s, rel=0.01) and sum(parts) == pytest.approx(
        wall_s, rel=0.01
    )
    assert 0.0 < facts["goodput"] < facts["steps_s"] / wall_s * 1.1


def job(**planted: dict[int, list[Event] | float]) -> list[RankLog]:
    """Two ranks of 100 steps of 20 ms. ``lengths_s`` and ``events`` by step number replace the usual ones."""
    logs = []
    for rank in range(2):
        now, steps = 5 * S, []
        for number in range(100):
            end = now + round(planted.get("lengths_s", {}).get(number, 0.02) * S)
            events = planted.get("events", {}).get(number, [Event("fwd", 0, 5 * MS, module=0)])
            steps.append(Step(number, now, end, tuple(events), (), 0, 0))
            now = end
        record = RankRecord("", rank, {"host": "a", "started_ns": 5 * S, "ended_ns": now + S})
        logs.append(RankLog(rank, record, tuple(steps)))
    return logs


def parts(logs: list[RankLog], ended_s: float) -> dict[RunPart, float]:
    account = run_account(logs, select_steps(logs)[1], {"a": Launch(0, round(ended_s * S))})
    assert account is not None and account.wall_s == pytest.approx(ended_s)
    return account.parts_s


def test_start_end_and_teardown() -> None:
    found = parts(job(), 10.0)
    assert found[RunPart.START] == pytest.approx(5.0) and found[RunPart.END] == pytest.approx(1.0)
    assert found[RunPart.STEPS] == pytest.approx(2.0) and found[RunPart.TEARDOWN] == pytest.approx(2.0)


def test_preparation_and_the_first_batch() -> None:
    first = [Event("data", 3 * S, 2 * S, loader=0), Event("fwd", 5 * S, 5 * MS, module=0)]
    found = parts(job(lengths_s={0: 5.02}, events={0: first}), 14.0)
    assert found[RunPart.PREPARATION] == pytest.approx(3.0) and found[RunPart.FIRST_BATCH] == pytest.approx(
        2.0
    )


@pytest.mark.parametrize(("start_ns", "duration_ns"), [(-5 * S, 2 * S), (9 * S, 2 * S), (S, 100 * S)])
def test_an_event_outside_of_its_step_makes_no_time(start_ns: int, duration_ns: int) -> None:
    found = parts(
        job(lengths_s={0: 5.02}, events={0: [Event("data", start_ns, duration_ns, loader=0)]}), 14.0
    )
    assert min(found.values()) >= 0.0


def test_a_pause_a_checkpoint_and_an_evaluation() -> None:
    saves = {50: [Event("save", 0, 900 * MS)]}
    found = parts(job(lengths_s={30: 8.02, 50: 0.92}, events=saves), 20.0)
    assert found[RunPart.PAUSES] == pytest.approx(8.0, rel=0.01) and found[
        RunPart.CHECKPOINTS
    ] == pytest.approx(0.9, rel=0.01)


def test_pauses_of_any_number_are_no_ordinary_steps() -> None:
    found = parts(job(lengths_s=dict.fromkeys((30, 41, 77), 2.02)), 20.0)
    assert found[RunPart.PAUSES] == pytest.approx(6.0, rel=0.01)
    assert found[RunPart.STEPS] == pytest.approx(2.0, rel=0.01)


def test_goodput_is_what_usual_steps_would_take() -> None:
    logs = job(lengths_s={30: 8.02})
    account = run_account(logs, select_steps(logs)[1], {"a": Launch(0, 20 * S)})
    assert account is not None and account.goodput == pytest.approx(100 * 0.02 / 20, rel=0.02)


@pytest.mark.parametrize(("attempt", "repeat"), [(1, 0), (0, 1)])
def test_what_earlier_attempts_took_is_no_start(attempt: int, repeat: int) -> None:
    """A launcher does not count a restart that another host's ranks cause."""
    logs = [
        replace(log, record=RankRecord("", log.rank, log.record.info | {"attempt": attempt}, repeat))
        for log in job()
    ]
    found = parts(logs, 10.0)
    assert found[RunPart.EARLIER_ATTEMPTS] == pytest.approx(5.0) and RunPart.START not in found


@pytest.mark.parametrize("launch", [Launch(8 * S, 20 * S), Launch(0, 3 * S), Launch(-(10**9) * S, 20 * S)])
def test_a_launcher_whose_times_cannot_be_those_of_the_run_is_none(launch: Launch) -> None:
    account = run_account(job(), {}, {"a": launch})
    assert account is not None and not account.is_whole and RunPart.START not in account.parts_s


def test_what_a_damaged_log_lacks_is_unknown() -> None:
    """Of rank 1 the first 20 and the last 50 of 100 steps of 20 ms are lost."""
    logs = job()
    logs[1] = RankLog(1, logs[1].record, logs[1].steps[20:50])
    found = parts(logs, 10.0)
    assert found[RunPart.UNKNOWN] == pytest.approx((0.4 + 1.0) / 2)
    assert found[RunPart.START] == pytest.approx(5.0) and found[RunPart.END] == pytest.approx(1.0)


def test_steps_that_are_written_twice_or_in_disorder_count_once() -> None:
    logs = [RankLog(log.rank, log.record, (*reversed(log.steps), *log.steps)) for log in job()]
    assert parts(logs, 10.0) == pytest.approx(parts(job(), 10.0))


def test_goodput_is_no_more_than_the_steps_took() -> None:
    """60 slow steps, then 40 fast ones; and step numbers that no run reaches."""
    logs = job(lengths_s=dict.fromkeys(range(60), 0.2))
    absurd = [
        RankLog(log.rank, log.record, tuple(replace(step, number=step.number * 10**13) for step in log.steps))
        for log in job()
    ]
    for each in (logs, absurd):
        account = run_account(each, select_steps(each)[1], {"a": Launch(0, 30 * S)})
        assert account is not None
        assert account.goodput * account.wall_s <= account.parts_s[RunPart.STEPS] * 1.0001


def test_what_happens_in_every_step_makes_no_step_long() -> None:
    """Each step saves something for 1 ms, and one that pauses for 8 s, too."""
    saves = {number: [Event("save", 0, MS)] for number in range(100)}
    found = parts(job(lengths_s={30: 8.02}, events=saves), 20.0)
    assert RunPart.CHECKPOINTS not in found and found[RunPart.PAUSES] == pytest.approx(8.0, rel=0.01)


def test_without_a_launcher_only_what_is_known_counts() -> None:
    account = run_account(job(), {}, {})
    assert account is not None and RunPart.START not in account.parts_s


TORCH = "/lib/python3/site-packages/torch/distributed/distributed_c10d.py"
PLACES = {
    1: Where("train.py", 7, "load_index", callers=Where("train.py", 90, "main").stack),
    2: Where("train.py", 91, "main"),
    3: Where(TORCH, 5000, "barrier"),
    4: Where("train.py", 120, "upload"),
    5: Where("<ddpdoctor, like importlib._bootstrap>", 77, "around.<locals>.wrapper"),
}
"""Lines of samples, by id."""


def sampled(log: RankLog, *spans: tuple[float, float, float, int, int]) -> RankLog:
    """The log with samples: each span is (begin, end, s between two samples, id of the user's line, id of the innermost one)."""
    rows = [
        (round(at * S), user, innermost, 0)
        for begin, end, apart, user, innermost in spans
        for at in np.arange(begin + apart / 2, end, apart)
    ]
    return msgspec.structs.replace(log, samples=np.array(rows, np.int64).reshape(-1, 4), sample_where=PLACES)


def facts_of(logs: list[RankLog], ended_s: float = 30.0) -> RunFacts:
    launches = {"a": Launch(0, round(ended_s * S))}
    account = run_account(logs, select_steps(logs)[1], launches)
    return run_facts(account, logs, launches, LogSourceLines(logs))


def prepared_job() -> list[RankLog]:
    """It prepares for 10 s, and waits 2 s for the first batch."""
    first = [Event("data", 10 * S, 2 * S, loader=0), Event("fwd", 12 * S, 5 * MS, module=0)]
    return job(lengths_s={0: 12.02}, events={0: first})


def test_the_lines_of_the_preparation_by_their_time() -> None:
    """Samples are taken a quarter as often after 30 s: their number does not show the time."""
    logs = [sampled(log, (5, 8, 0.06, 2, 2), (8, 17, 0.24, 1, 1)) for log in prepared_job()]
    found = facts_of(logs)
    assert found.preparation_ranks is None and [each.line for each in found.preparation_where] == [7, 91]
    assert [each.share for each in found.preparation_where] == pytest.approx([0.75, 0.25], abs=0.02)
    assert found.preparation_where[0].callers[0].line == 90


@pytest.mark.parametrize("innermost", [3, 5], ids=["in torch", "in the wrapper of Work.wait"])
def test_the_rank_that_prepares_is_named_not_those_that_wait_for_it(innermost: int) -> None:
    one, other = prepared_job()
    found = facts_of([sampled(one, (5, 17, 0.06, 2, innermost)), sampled(other, (5, 17, 0.06, 1, 1))])
    assert found.preparation_ranks == [1] and [each.line for each in found.preparation_where] == [7]


def test_where_all_wait_the_line_of_the_wait_is_named() -> None:
    found = facts_of([sampled(log, (5, 17, 0.06, 2, 3)) for log in prepared_job()])
    assert found.preparation_ranks is None and [each.line for each in found.preparation_where] == [91]


def test_the_lines_after_the_last_step() -> None:
    logs = [sampled(log, (5, 17, 0.06, 1, 1), (19.1, 20, 0.06, 4, 4)) for log in prepared_job()]
    found = facts_of(logs)
    assert [each.line for each in found.end_where] == [120] and found.end_ranks is None
    assert found.end_s == pytest.approx(11.0, abs=0.1) and found.exit_s == pytest.approx(10.0, abs=0.1)


@pytest.mark.parametrize(
    ("called_s", "joining_s", "last"),
    [((1.0, 4.5), 4.0, [1]), ((4.0, 4.3), 1.0, None), ((1.0, None), None, None)],
)
def test_the_rank_that_joined_last(
    called_s: tuple[float, float | None], joining_s: float | None, last: list[int] | None
) -> None:
    """The process group exists at 5 s."""
    logs = prepared_job()
    for log, at_s in zip(logs, called_s, strict=True):
        log.record.info["joining_ns"] = None if at_s is None else round(at_s * S)
    found = facts_of(logs)
    assert found.joining_s == (joining_s and pytest.approx(joining_s)) and found.last_ranks == last


def test_without_samples_no_line() -> None:
    found = facts_of(prepared_job())
    assert found.preparation_where == found.end_where == [] and found.preparation_s == pytest.approx(10.0)


def test_evaluations_and_the_checkpoints_in_their_steps() -> None:
    """At the end of each epoch the job evaluates for 2 s, and rank 0 saves for 0.5 s."""
    evaluates = [Event("eval", 0, 2 * S)]
    logs = job(lengths_s=dict.fromkeys((30, 60, 90), 2.52), events=dict.fromkeys((30, 60, 90), evaluates))
    saves = [
        msgspec.structs.replace(step, events=(*step.events, Event("save", 2 * S, 500 * MS)))
        if step.number in (30, 60, 90)
        else step
        for step in logs[0].steps
    ]
    found = facts_of([msgspec.structs.replace(logs[0], steps=tuple(saves)), logs[1]])
    assert found.evaluation is not None and found.checkpoints is not None and found.steps == 100
    assert found.evaluation.total_s == found.evaluation_s == pytest.approx(6.0, rel=0.02)
    assert found.checkpoints.total_s == found.checkpoint_s == pytest.approx(1.5, rel=0.02)
    assert (found.evaluation.count, found.evaluation.every, found.evaluation.ranks) == (3, 30, None)
    assert (found.checkpoints.count, found.checkpoints.ranks) == (3, [0])
    assert found.evaluation.share == pytest.approx(0.2, rel=0.02)


def test_the_start_of_the_training_loader_is_no_evaluation() -> None:
    """At the beginning of an epoch the job evaluates for 1 s, and starts the workers of its training loader for 2 s."""
    usual = [Event("data", 0, MS, loader=0), Event("fwd", MS, 5 * MS, module=0)]
    epoch = [
        Event("eval", 0, S),
        Event("iter", S, 500 * MS, loader=0),
        Event("data", 1500 * MS, 1500 * MS, loader=0),
    ]
    events = dict.fromkeys(range(100), usual) | {50: epoch}
    found = facts_of(job(lengths_s={50: 3.02}, events=events))
    assert found.evaluation_s == pytest.approx(1.0, rel=0.02) and found.epochs_s == pytest.approx(
        2.0, rel=0.02
    )


@pytest.mark.parametrize(
    "slow", [range(100), range(60, 150), range(0, 150, 2)], ids=["until", "since", "every second"]
)
def test_a_run_whose_step_time_changes_is_diagnosed(tmp_path: Path, slow: range) -> None:
    """No part of it contradicts another one, and the time that the slower steps took is told as such."""
    steps = 150
    run = record(tmp_path / "run", Job(steps=steps, extra=lambda rank, step: {"host": 30.0 * (step in slow)}))
    manifest = json.loads((run / "manifest.json").read_text())
    times = [
        json.loads(line)["t"]
        for line in (run / "ranks/00000/steps.jsonl").open()
        if '"t":[' in line.replace(" ", "")
    ]
    manifest |= {"started_ns": times[0][0] - S, "ended_ns": times[-1][1] + S, "host": "node0"}
    (run / "manifest.json").write_text(json.dumps(manifest))
    found = analyze(str(run), Options(cache=False, jobs=1))
    assert not found.verdict.headline.startswith("Cannot tell") and not any(
        "contradict" in note for note in found.notes
    )
    (event,) = [
        found.facts["run"][name] for name in ("periodic", "change") if found.facts["run"][name] is not None
    ]
    assert event["total_s"] == pytest.approx(0.03 * len(slow), rel=0.15) and 0.0 < event["share"] < 1.0


def test_a_pause_behind_the_last_synchronisation_counts_once(tmp_path: Path) -> None:
    """Rank 1 takes 1 s longer in the optimizer of step 60, for which rank 0 waits in step 61."""
    job = Job(world=2, steps=120, extra=lambda rank, step: {"optimizer": 1000.0 * ((rank, step) == (1, 60))})
    run = record(tmp_path / "run", job)
    facts = analyze(str(run), Options(cache=False, jobs=1)).facts["run"]
    assert facts["pause"]["steps"] == [60] and facts["pause"]["ranks"] == [1]
    assert facts["pause"]["total_s"] == pytest.approx(1.0, rel=0.01)
    assert facts["pauses_s"] == pytest.approx(1.0, rel=0.01)


def change_of(folder: Path, extra: dict[str, float]) -> dict[str, Any]:
    """The fact on a job that takes longer from step 100 on, on all ranks."""
    run = record(
        folder / "run", Job(world=2, steps=200, extra=lambda rank, step: extra if step >= 100 else {})
    )
    return analyze(str(run), Options(cache=False, jobs=1)).facts["run"]["change"]


@pytest.mark.parametrize(
    ("late_rank", "ranks", "kind"), [(1, [1], "data"), (None, None, None)], ids=["one loader", "unknown"]
)
def test_hosts_that_wait_for_their_devices_are_not_named(
    tmp_path: Path, late_rank: int | None, ranks: list[int] | None, kind: str | None
) -> None:
    """On GPUs, from step 100 on, the loader of a rank takes 30 ms longer, and the other hosts as much longer in ``loss.item()``."""

    def extra(rank: int, step: int) -> dict[str, float]:
        return {"data" if rank == late_rank else "host": 30.0 * (step >= 100)}

    run = record(tmp_path / "run", Job(steps=200, extra=extra))
    for file in run.glob("ranks/*/rank.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"device": "cuda"}))
    change = analyze(str(run), Options(cache=False, jobs=1)).facts["run"]["change"]
    assert (change["ranks"], change["kind"]) == (ranks, kind)
    assert bool(change["where"]) == (kind is not None)


def test_own_work_of_several_kinds_is_no_communication(tmp_path: Path) -> None:
    """As with lowered clocks, under which all kinds of work take longer and none of them for half of the extra time."""
    assert change_of(tmp_path, {"data": 6.0, "forward": 7.0, "host": 6.5})["kind"] == "compute"


@pytest.mark.parametrize(
    ("extra", "in_all"),
    [
        ({"forward": 2.0, "backward": 3.0, "optimizer": 0.3}, True),
        ({"forward": 5.0}, False),
        ({"forward": 3.0, "backward": 6.0}, False),
        ({"data": 8.0}, None),
    ],
    ids=["a slower machine", "code in the forward pass", "larger inputs", "no computation"],
)
def test_a_machine_that_gets_slower_is_no_change_of_the_code(
    tmp_path: Path, extra: dict[str, float], in_all: bool | None
) -> None:
    assert change_of(tmp_path, extra)["in_all_phases"] is in_all


def test_of_a_rank_without_details_it_is_not_known_that_it_waited(tmp_path: Path) -> None:
    """All ranks pause in step 100, of which rank 0 has the times only."""
    job = Job(world=2, steps=200, extra=lambda rank, step: {"host": 1000.0 * (step == 100)})
    run = record(tmp_path / "run", job)
    log = run / "ranks/00000/steps.jsonl"
    lines = [json.loads(line) for line in log.open()]
    log.write_text(
        "".join(json.dumps({**line, "ev": []} if line.get("step") == 100 else line) + "\n" for line in lines)
    )
    pause = analyze(str(run), Options(cache=False, jobs=1)).facts["run"]["pause"]
    assert pause["steps"] == [100] and pause["ranks"] is None and pause["kind"] == "host"


def test_a_pause_of_which_only_times_and_samples_were_kept_is_that_of_the_rank_that_does_not_wait() -> None:
    """Rank 1 is at a line of its own for 3 s, rank 0 meanwhile at the line of its backward pass."""
    logs = []
    for log in job(lengths_s={50: 3.02}):
        backward = Event("bwd", 6 * MS, 5 * MS, where=2)
        steps = [
            msgspec.structs.replace(step, events=() if step.number == 50 else (*step.events, backward))
            for step in log.steps
        ]
        pause_s = log.steps[50].start_ns / S
        line = 2 if log.rank == 0 else 4
        span = (pause_s, pause_s + 3.0, 0.05, line, line)
        log = msgspec.structs.replace(log, steps=tuple(steps), where=PLACES)
        logs.append(sampled(log, span))
    pause = facts_of(logs).pause
    assert pause is not None and pause.steps == [50] and pause.ranks == [1]
    assert [where.line for where in pause.where] == [PLACES[4].line] and pause.kind is None
