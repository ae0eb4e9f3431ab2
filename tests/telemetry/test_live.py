"""A run followed while it is written: from recorded runs, and from files that grow under the reader."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddpdoctor.measure.telemetry import read_telemetry
from ddpdoctor.telemetry import live as module
from ddpdoctor.telemetry.live import LivePhase, LiveRun, data_wait_ms, phase_shares, step_ms

FIXTURES = Path(__file__).parents[2] / "fixtures"
SECOND_NS = 1_000_000_000


def write_rank(run, rank, *, host="a", late_ms=0.0, steps=10, clock_ns=0):
    """A rank whose steps take 100 ms; it arrives at the reduction 50 ms + ``late_ms`` into the step."""
    folder = run / "ranks" / f"{rank:05d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rank.json").write_text(json.dumps({"rank": rank, "host": host, "pid": 1}))
    with (folder / "steps.jsonl").open("a") as log:
        log.write('{"schema":"ddpdoctor.steps/2"}\n')
        for number in range(steps):
            log.write(step_line(number, late_ms, clock_ns))
    return folder / "steps.jsonl"


def step_line(number, late_ms=0.0, clock_ns=0):
    start = SECOND_NS + number * SECOND_NS // 10 + clock_ns
    events = [
        {"k": "data", "s": 0, "d": 3_000_000, "n": 16},
        {"k": "bwd", "s": 20_000_000, "d": 60_000_000, "sync": True, "base": 20_000_000},
    ]
    events[1]["ready"] = [10_000_000, round((30 + late_ms) * 1e6)]
    return json.dumps({"step": number, "t": [start, start + SECOND_NS // 10], "ev": events}) + "\n"


def looked(path):
    run = LiveRun(path)
    run.update()
    return run


def test_a_recorded_run_reads_as_it_was():
    run = looked(FIXTURES / "slow-data-one-rank")
    assert run.ended and sorted(run.ranks) == [0, 1]
    assert run.ranks[0].steps_total == run.ranks[1].steps_total == 100
    assert data_wait_ms(run.ranks[1], 50) > 30 > 5 > data_wait_ms(run.ranks[0], 50)
    late = run.lateness_of(50).by_rank_ms
    assert late[1] > 20 and late[0] == -late[1]
    assert 100 < run.samples_per_s(50) < 500
    assert run.samples, "the newest telemetry sample of the host"


def test_lateness_is_measured_at_the_reduction(tmp_path):
    for rank in range(4):
        write_rank(tmp_path, rank, late_ms=15.0 if rank == 2 else 0.0)
    run = looked(tmp_path)
    assert run.lateness_of(5).by_rank_ms == {0: 0.0, 1: 0.0, 2: pytest.approx(15.0), 3: 0.0}
    assert step_ms(run.ranks[2], 5) == pytest.approx(100.0)
    assert run.samples_per_s(5) == pytest.approx(4 * 160.0)


def test_ranks_that_take_turns_are_not_late(tmp_path):
    for rank in range(2):
        log = write_rank(tmp_path, rank, steps=1)
        with log.open("a") as out:
            out.writelines(step_line(n, late_ms=20.0 if n % 2 == rank else 0.0) for n in range(1, 11))
    assert looked(tmp_path).lateness_of(10).by_rank_ms == {0: pytest.approx(0.0), 1: pytest.approx(0.0)}


def test_a_clock_that_is_ahead_makes_no_rank_late(tmp_path):
    for rank in range(4):
        write_rank(tmp_path, rank, host="ab"[rank // 2], clock_ns=(rank // 2) * 7_000_000)
    late = looked(tmp_path).lateness_of(5).by_rank_ms
    assert all(abs(value) < 0.01 for value in late.values())


def test_only_what_is_new_is_read_and_a_cut_line_waits_for_its_rest(tmp_path):
    log = write_rank(tmp_path, 0, steps=2)
    run = looked(tmp_path)
    line = step_line(2)
    with log.open("a") as out:
        out.write(line[:40])
        out.flush()
        run.update()
        assert run.ranks[0].steps_total == 2
        out.write(line[40:] + "not json\n" + step_line(3))
    run.update()
    assert [step.number for step in run.ranks[0].steps] == [0, 1, 2, 3]


def test_of_a_long_backlog_the_end_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOOK_BYTES", 1000)
    write_rank(tmp_path, 0, steps=500)
    run = looked(tmp_path)
    assert run.ranks[0].steps_total == 500 and len(run.ranks[0].steps) < 10


def test_thinned_steps_have_times_but_no_parts(tmp_path):
    log = write_rank(tmp_path, 0, steps=1)
    with log.open("a") as out:
        out.write('{"step":1,"t":[1100000000,1200000000],"thin":true}\n')
    run = looked(tmp_path)
    assert step_ms(run.ranks[0], 5) == pytest.approx(100.0)
    assert data_wait_ms(run.ranks[0], 5) is None and run.samples_per_s(5) is None


def thinned_line(number):
    start = SECOND_NS + number * SECOND_NS // 10
    return json.dumps({"step": number, "t": [start, start + SECOND_NS // 10], "thin": True}) + "\n"


def write_thinned(run, rank, every, steps, late_ms=0.0):
    """One block of eight steps in ``every`` is recorded in full."""
    log = write_rank(run, rank, steps=0)
    with log.open("a") as out:
        for number in range(steps):
            full = number // 8 % every == 0
            out.write(step_line(number, late_ms) if full else thinned_line(number))


def test_what_was_recorded_last_in_full_stays_and_grows_old(tmp_path):
    for rank in range(2):
        write_thinned(tmp_path, rank, every=64, steps=700, late_ms=15.0 * rank)
    run = looked(tmp_path)
    assert run.lateness.by_rank_ms == {0: pytest.approx(-15.0), 1: pytest.approx(15.0)}
    # The newest block in full holds the steps 512 to 519, and ended 18 s before the newest step.
    assert run.lateness.newest_ns == SECOND_NS + 520 * SECOND_NS // 10
    assert data_wait_ms(run.ranks[1], 20) == pytest.approx(3.0)
    assert run.samples_per_s(20) == pytest.approx(2 * 160.0)


def test_ranks_that_thin_differently_are_compared_where_both_were_recorded(tmp_path):
    write_thinned(tmp_path, 0, every=1, steps=150)
    write_thinned(tmp_path, 1, every=16, steps=150, late_ms=15.0)
    run = looked(tmp_path)
    assert run.lateness.by_rank_ms[1] == pytest.approx(15.0)
    assert run.lateness.newest_ns == SECOND_NS + 136 * SECOND_NS // 10


def test_lateness_of_a_rank_that_was_restarted_is_not_its_old_one(tmp_path):
    for rank in range(2):
        write_rank(tmp_path, rank, late_ms=15.0 * rank)
    run = looked(tmp_path)
    assert run.lateness.by_rank_ms
    (tmp_path / "ranks" / "00000.1").mkdir()
    (tmp_path / "ranks" / "00000.1" / "rank.json").write_text('{"rank": 0, "host": "a", "pid": 2}')
    run.update()
    assert run.lateness.by_rank_ms == {}


def test_the_phases_of_a_step_add_up_and_what_lies_within_is_taken_out(tmp_path):
    folder = tmp_path / "ranks" / "00000"
    folder.mkdir(parents=True)
    (folder / "rank.json").write_text('{"rank": 0, "host": "a", "pid": 1}')
    ms = 1_000_000
    events = [
        {"k": "fwd", "s": 20 * ms, "d": 30 * ms},
        {"k": "data", "s": 0, "d": 10 * ms, "n": 4},
        {"k": "coll", "s": 30 * ms, "d": 10 * ms},
        {"k": "gc", "s": 22 * ms, "d": 5 * ms},
        {"k": "bwd", "s": 50 * ms, "d": 40 * ms},
        {"k": "opt", "s": 90 * ms, "d": 50 * ms},
    ]
    line = {"step": 1, "t": [SECOND_NS, SECOND_NS + 100 * ms], "ev": events}
    (folder / "steps.jsonl").write_text(json.dumps(line) + "\n")
    shares = phase_shares(looked(tmp_path).ranks[0], 5)
    assert shares == {
        LivePhase.DATA: pytest.approx(0.1),
        LivePhase.OTHER: pytest.approx(0.1),
        LivePhase.FORWARD: pytest.approx(0.2),
        LivePhase.SYNC: pytest.approx(0.1),
        LivePhase.BACKWARD: pytest.approx(0.4),
        LivePhase.OPTIMIZER: pytest.approx(0.1),
    }


def test_a_restarted_rank_replaces_its_first_recording(tmp_path):
    write_rank(tmp_path, 0, steps=9)
    run = looked(tmp_path)
    write_rank(tmp_path, 1, steps=3)
    shutil.move(tmp_path / "ranks" / "00001", tmp_path / "ranks" / "00000.1")
    (tmp_path / "ranks" / "00000.1" / "rank.json").write_text('{"rank": 0, "host": "a", "pid": 2}')
    run.update()
    assert run.ranks[0].pid == 2 and run.ranks[0].steps_total == 3
    assert run.ranks[0].restarts == 1


@pytest.mark.parametrize(
    ("changed", "shown"), [({}, [0, 1]), ({"pid": 5}, [0]), ({"attempt": 1}, [0]), ({"host": "b"}, [0])]
)
def test_a_group_that_a_rank_makes_for_itself_afterwards_ends_no_other(tmp_path, changed, shown):
    """Rank 0 evaluates alone: the same process, with a world of one. A restarted job may be so small, too."""
    for rank in range(2):
        folder = write_rank(tmp_path, rank).parent
        info = {"rank": rank, "host": "a", "pid": 1 + rank, "world_size": 2, "attempt": 0}
        (folder / "rank.json").write_text(json.dumps(info))
    again = tmp_path / "ranks" / "00000.1"
    shutil.copytree(tmp_path / "ranks" / "00000", again)
    info = {"rank": 0, "host": "a", "pid": 1, "world_size": 1, "attempt": 0, **changed}
    (again / "rank.json").write_text(json.dumps(info))
    assert list(looked(tmp_path).ranks) == shown


def test_of_many_attempts_the_newest_is_shown_without_ranks_that_it_lacks(tmp_path):
    for rank in range(2):
        for attempt in range(12 - rank):
            folder = tmp_path / "ranks" / (f"{rank:05d}.{attempt}" if attempt else f"{rank:05d}")
            folder.mkdir(parents=True)
            info = {"rank": rank, "pid": 100 * rank + attempt, "world_size": 1 + (attempt < 11)}
            (folder / "rank.json").write_text(json.dumps(info))
    run = looked(tmp_path)
    assert (list(run.ranks), run.ranks[0].pid, run.ranks[0].restarts) == ([0], 11, 11)


def test_nothing_there_is_nothing_seen(tmp_path):
    run = looked(tmp_path / "missing")
    assert (
        not run.ranks
        and run.lateness_of(5).by_rank_ms == {}
        and run.samples_per_s(5) is None
        and not run.ended
    )


def test_a_clock_that_is_set_between_two_readings_makes_nobody_late(tmp_path):
    """Rank 0 read it before, rank 1 behind: in step 9 only."""
    for rank in range(2):
        log = write_rank(tmp_path, rank, late_ms=15.0 * rank, steps=9)
        with log.open("a") as lines:
            lines.write(step_line(9, 15.0 * rank, clock_ns=-10 * SECOND_NS * rank))
    run = looked(tmp_path)
    assert run.lateness_of(1).by_rank_ms == {}
    assert run.lateness_of(2).by_rank_ms == {0: pytest.approx(-15.0), 1: pytest.approx(15.0)}


def test_telemetry_of_a_clock_that_was_set_back_goes_on(tmp_path):
    path = tmp_path / "telemetry.jsonl"
    times = [100, 101, 102, 93, 94, 95, 96, 97, 98, 99, 100]
    lines = [{"schema": "ddpdoctor.telemetry/2", "host": "a"}]
    lines += [{"t_ns": t * SECOND_NS, "host": {"cpu_percent": float(i)}} for i, t in enumerate(times)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    at, percent = read_telemetry(path).host_column("cpu_percent")
    assert (at // SECOND_NS).tolist() == list(range(100, 111)) and percent.tolist() == list(range(11))


def test_lines_written_during_a_look_are_read_once(tmp_path, monkeypatch):
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b"0\n1\n")

    @contextmanager
    def growing(name):
        with open(name, "rb") as source:

            class Growing:
                fileno, seek = source.fileno, source.seek

                def read(self, count):
                    with path.open("ab") as more:
                        more.write(b"2\n")
                    return source.read(count)

            yield Growing()

    tail = module.FileTail(path)
    with monkeypatch.context() as patched:
        patched.setattr(module, "reading", growing)
        assert list(tail.read_new_lines()) == [b"0", b"1", b"2"]
    assert list(tail.read_new_lines()) == []
