"""Collects the records of each rank's end in the job's last attempt, from the run directory, the hosts' documents and dumps."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ddpdoctor.measure.places import CodeLine, Where
from ddpdoctor.measure.steplog import RankLog
from ddpdoctor.rundir import STEPS_FILE, Note
from ddpdoctor.rundir.attempts import attempts_of
from ddpdoctor.rundir.ends import POLITE, JobEnd, job_end
from ddpdoctor.rundir.liveness import is_running
from ddpdoctor.rundir.packages import fatal_signal, faulting_thread, first_thread, says_gil_is_held
from ddpdoctor.rundir.reader import RankRecord, RunDirectory
from ddpdoctor.rundir.stepevents import LineField, Phase, waits_for_others
from ddpdoctor.rundir.stops import End, HostStop, RankStop, Standstill, Stops, launches_of, read_stops

from .calls import Call, calls_of, with_open_calls
from .recording import (
    DEFAULT_DESCRIPTION,
    GroupKey,
    Recording,
    is_user_line,
    lines_of,
    place_of,
    read_dump,
    stack_of,
)
from .standstill import hang_s, without_earlier_hangs

_STEP_PREFIX = f"{{{LineField.STEP.key}".encode()


def last_attempt(runs: Sequence[RunDirectory], logs: Sequence[RankLog]) -> list[RankRecord]:
    """The recordings of the attempt whose end is the job's. These are the analysed ones, unless later recordings are a restart by the
    launcher, or of a later start of the job, or have steps. Of several attempts, the one with the most steps is analysed."""
    analysed = [record for run in runs for record in run.ranks]
    restarts = max((record.attempt for record in analysed), default=0)
    ends = [log.steps[-1].end_ns for log in logs if log.steps]
    later = [
        record
        for run in runs
        for record in run.recordings
        if ends
        and (record.info.get("started_ns") or 0) > max(ends)
        and (record.attempt > restarts or not run.ranks or _has_steps(record))
    ]
    if not later:
        return analysed
    return attempts_of(later)[-1].ranks


def _has_steps(record: RankRecord) -> bool:
    try:
        return any(line.startswith(_STEP_PREFIX) for line in record.lines(STEPS_FILE))
    except OSError:
        return False


def rows_by_rank(
    hosts: Sequence[HostStop], document: str, rows: str, pids: Mapping[int, Any], other_pids: set[Any]
) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """(rows by rank of processes ``pids`` or unknown processes, rows of other attempts). ``other_pids``: process ids of other attempts."""
    found, others = dict[int, dict[str, Any]](), list[dict[str, Any]]()
    for host in hosts:
        for row in (getattr(host, document) or {}).get(rows) or ():
            if not isinstance(row.get("rank"), int):
                continue
            pid = row.get("pid")
            if pid == pids.get(row["rank"]) or (pids.get(row["rank"]) is None and pid not in other_pids):
                found[row["rank"]] = row | {"host": host.host}
            else:
                others.append(row | {"host": host.host})
    return found, others


def end_by_launcher(record: RankRecord, launches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The end of a rank whose parent is the launcher, as recorded by the launcher; {} for other ranks."""
    info = record.info
    parent = info.get("host"), info.get("pid_namespace"), info.get("parent_pid")
    names = ("host", "pid_namespace", "pid")
    own = (each for each in launches if None not in parent and tuple(map(each.get, names)) == parent)
    launch = next(own, {})
    if not launch.get("ended_ns"):
        return {}
    return {"code": launch.get("exit_code"), "signal": launch.get("signal"), "seen_ns": launch["ended_ns"]}


_BY_EXCEPTION = (End.EXCEPTION, End.RAISING)


class RankEvidence(msgspec.Struct, frozen=True):
    """Last known state of one rank. Unknown values are None or empty."""

    rank: int
    host: str | None = None
    step: int | None = None
    step_since_ns: int | None = None
    seen_ns: int | None = None
    """Time of the rank's own last report, epoch ns."""
    phase: str | None = None
    stack: Sequence[CodeLine] = ()
    where: Where | None = None
    sampled: Where | None = None
    """The user's line in its last stack sample. It may be of an earlier step, but not from before the first step."""
    process: Mapping[str, Any] = msgspec.field(default_factory=dict)
    joined: bool = True
    """Whether it had joined its process group; True if unknown."""
    waits: bool | None = None
    computes: bool = False
    """Whether the hang monitor saw it use CPU time: it may be in a long computation."""
    in_order: bool = False
    """Whether it closed its recording (at the end of its process group or of Python), or its exit code is 0."""
    closed_before: bool = False
    """Whether it had closed its recording before the job hung; equal to ``in_order`` if the hang monitor reported no hang."""
    left: bool = False
    """Whether Python ended without an exception; the exit code was then set by the program."""
    exhausted: bool = False
    raised: Sequence[Mapping[str, Any]] = ()
    raised_ns: int | None = None
    code: int | None = None
    signal: int | None = None
    gone_ns: int | None = None
    """When its process was found to be gone, epoch ns."""
    oom_kills: int = 0
    faults: str = ""
    recording: Recording | None = None
    calls: tuple[Call, ...] = ()
    """The last collectives that it called, from Python or by DDP."""

    @property
    def open_call(self) -> Call | None:
        """The last call, if it has not returned."""
        last = self.calls[-1] if self.calls else None
        return last if last is not None and not last.returned and last.step == self.step else None

    @property
    def is_gone(self) -> bool:
        return self.gone_ns is not None

    @property
    def holds_gil(self) -> bool:
        """Whether faulthandler's output shows that a thread holds the GIL."""
        return says_gil_is_held(self.faults)


class RunEvidence(msgspec.Struct, frozen=True):
    """Evidence on the end of a run."""

    ranks: dict[int, RankEvidence]
    hangs: bool
    """Whether the job hung, not only in a phase that takes long."""
    still_hangs: bool = False
    """Whether it still hung at the last poll."""
    detected_ns: int | None = None
    since_s: float | None = None
    step: int | None = None
    job: JobEnd = JobEnd()
    oom_kills: int = 0
    backend: str | None = None
    devices: Mapping[int, Sequence[str]] = msgspec.field(default_factory=dict)
    """By rank, errors of its device that NVML counted."""
    programs: Mapping[int, Sequence[tuple[int, str]]] = msgspec.field(default_factory=dict)
    """By rank, errors of programs that NVML counted on its device (epoch ns, text): of the rank or of another process on it."""
    looked_ns: int | None = None
    """Time of the last poll during the hang, epoch ns."""
    end_request: EndRequest | None = None
    """How it was ended from outside."""
    killed: bool = False
    """Whether it was killed together with its launcher, which did not record an end."""
    ended_by_option: bool = False
    """Whether its launcher ended it because it hung."""
    earlier: Sequence[Mapping[str, Any]] = ()
    """Rows of ``ends.json`` of earlier attempts' ranks that did not end in order."""

    @property
    def exit_code(self) -> int | None:
        """The job's exit code; None if it was ended from outside."""
        return None if self.end_request else self.job.code

    def existed_in_hang(self, each: RankEvidence) -> bool:
        """Whether a rank still existed when the hang was detected. A later end was caused by a watchdog or a user."""
        late = each.gone_ns is not None and self.detected_ns is not None and each.gone_ns > self.detected_ns
        return self.hangs and (late or not each.is_gone)


def first_step(of: Iterable[RankEvidence | Call]) -> int | None:
    """The lowest known step of ranks or of calls."""
    return min((each.step for each in of if each.step is not None), default=None)


def stops_of(runs: Sequence[RunDirectory], notes: list[Note]) -> dict[str, Stops]:
    """Path of each of the ``runs`` → its records of stops, by ranks and hosts."""
    return {run.path: read_stops(run.path, notes) for run in runs}


def evidence_of(
    runs: Sequence[RunDirectory],
    logs: Sequence[RankLog],
    notes: list[Note],
    devices: Mapping[int, Sequence[str]] | None = None,
    programs: Mapping[int, Sequence[tuple[int, str]]] | None = None,
    records: Sequence[RankRecord] | None = None,
    stops: Mapping[str, Stops] | None = None,
) -> RunEvidence:
    """The evidence on each rank of an attempt, from the run directories of one job. ``records``: of the attempt; None: of the attempt whose
    end is the job's. ``devices``, ``programs``: as in :class:`RunEvidence`. ``stops``: :func:`stops_of` the ``runs``, if already read."""
    records = last_attempt(runs, logs) if records is None else records
    paths = {record.path for record in records}
    # If the job was started several times, only the run directories of this start.
    runs = [run for run in runs if not paths.isdisjoint(each.path for each in run.recordings)] or runs
    launches = [each for run in runs for each in launches_of(run.path, notes)]
    others = [each for run in runs for each in run.recordings if each.path not in paths]
    began_ns = min((record.info.get("started_ns") or 0 for record in records), default=0) if others else 0
    job = job_end([run.manifest for run in runs], launches, began_ns)
    written = stops_of(runs, notes) if stops is None else stops
    rank_stops = [stop for run in runs for stop in written[run.path].ranks]
    hosts = without_earlier_hangs([host for run in runs for host in written[run.path].hosts])
    chosen = {(record.rank, record.repeat): record for record in records}
    by_rank = {stop.rank: stop for stop in rank_stops if not chosen or (stop.rank, stop.repeat) in chosen}
    own = {record.rank: record for record in records}
    steps = {log.rank: log for log in logs if not records or log.record.path in paths}
    pids = {record.rank: record.info.get("pid") for record in records}
    other_pids = {each.info.get("pid") for each in others}
    seen, _ = rows_by_rank(hosts, "stall", "ranks", pids, other_pids)
    ended, rows_of_others = rows_by_rank(hosts, "ends", "ends", pids, other_pids)
    for record in records:
        row = ended.get(record.rank, {})
        if row.get("code") is None and row.get("signal") is None:
            ended[record.rank] = row | end_by_launcher(record, launches)
    all_ranks = sorted({*by_rank, *own, *steps, *seen, *ended})
    ranks = {
        rank: _rank_evidence(
            rank,
            own.get(rank),
            by_rank.get(rank),
            seen.get(rank, {}),
            ended.get(rank, {}),
            steps.get(rank),
            notes,
        )
        for rank in all_ranks
    }
    stalls = [host.stall for host in hosts if host.stall]
    killed = job.killed and not any(is_running(record.info) for record in records)
    since_s = hang_s(stalls, ranks, logs, killed=killed)
    states = [stall.get("state") for stall in stalls]
    known = [each.step for each in ranks.values() if each.step is not None]
    all_in_order = not any(each.raised or (each.is_gone and not each.in_order) for each in ranks.values())
    asked = asked_to_end(job, records, hosts, began_ns, all_in_order=all_in_order)
    return RunEvidence(
        ranks,
        hangs=since_s is not None,
        still_hangs=Standstill.LASTS in states and not job.over and not killed,
        detected_ns=min((s["detected_ns"] for s in stalls if s.get("detected_ns")), default=None),
        since_s=since_s,
        step=max(known, default=None),
        job=job,
        oom_kills=sum(int((host.ends or {}).get("oom_kills") or 0) for host in hosts),
        backend=next((str(each.info["backend"]) for each in records if each.info.get("backend")), None),
        devices=devices or {},
        programs=programs or {},
        looked_ns=max((s["looked_ns"] for s in stalls if s.get("looked_ns")), default=None),
        end_request=asked,
        earlier=[row for row in rows_of_others if not row.get("in_order")],
        killed=killed,
        ended_by_option=Standstill.KILLED in states,
    )


def _rank_evidence(
    rank: int,
    record: RankRecord | None,
    stop: RankStop | None,
    seen: Mapping[str, Any],
    ended: Mapping[str, Any],
    log: RankLog | None,
    notes: list[Note],
) -> RankEvidence:
    info = {} if record is None else record.info
    ending = _ending(stop, ended, log)
    documents = [each for each in (stop.standing, stop.progress) if each] if stop else []
    # Each of these was written at a different time and may be truncated; step numbers only grow.
    steps = [*(each.get("step") for each in (ending, *documents, seen, ended)), _next_step(log)]
    step = max((each for each in steps if each is not None), default=None)
    # A report of an earlier step is out of date.
    said = [ending, *(each for each in documents if each.get("step") in (None, step))]
    newest = max(said, key=lambda each: each.get("at_ns") or 0)
    faults = stop.faults if stop else ""
    joined = seen.get("joined", ended.get("joined")) is not False
    waits = seen.get("waits", ended.get("waits"))
    reported = stack_of(first_thread(seen.get("faults") or ""))
    stack, where = _stack(newest, faults, log) if joined else (reported, place_of(reported))
    phase = newest.get("phase") or seen.get("phase")
    if not joined and waits:
        phase = Phase.RENDEZVOUS
    raised = ending.get("raised") or () if ending.get("how") in _BY_EXCEPTION else newest.get("raised") or ()
    raised = raised or ended.get("raised") or ()
    code, number = ended.get("code"), ended.get("signal")
    if ended and code is None and number is None:
        number = fatal_signal(faults)  # its parent reaped it before the kernel could be queried
    if raised and raised[0].get("type") == KeyboardInterrupt.__name__:
        raised = ()
    groups = None if newest is ending else newest.get("groups")
    if waits is None and phase is not None:
        in_torch = phase == Phase.BACKWARD and bool(stack) and "torch" in stack[0].file
        waits = in_torch or waits_for_others(phase, groups)
    in_order = not raised and bool(
        seen.get("in_order") or ended.get("in_order") or ending.get("how") == End.IN_ORDER
    )
    return RankEvidence(
        rank=rank,
        host=(None if record is None else record.host) or seen.get("host") or ended.get("host"),
        step=step,
        step_since_ns=newest.get("step_since_ns") or seen.get("last_step_ns") or _last_end_ns(log),
        seen_ns=newest.get("at_ns") or _last_sample_ns(log),
        phase=phase,
        stack=stack,
        where=where,
        sampled=_last_sampled(log),
        process=seen.get("process") or {},
        joined=joined,
        waits=waits,
        computes=bool(seen.get("computes")),
        in_order=in_order,
        closed_before=in_order and bool(seen.get("in_order", True)),
        left=ending.get("how") == End.IN_ORDER,
        exhausted=bool(newest.get("exhausted")),
        raised=raised,
        raised_ns=ending.get("at_ns") or ended.get("seen_ns") if raised else None,
        code=code,
        signal=number,
        gone_ns=ended.get("seen_ns") if ended else None,
        oom_kills=int(ended.get("oom_kills") or 0),
        faults=faults,
        recording=_recording(rank, info, stop, newest, notes),
        calls=with_open_calls(calls_of(stop.calls if stop else (), log, _groups_of(info)), groups),
    )


def _ending(stop: RankStop | None, ended: Mapping[str, Any], log: RankLog | None) -> Mapping[str, Any]:
    """The rank's own record of its end; {} if it continued after the exception."""
    ending = (stop.ending if stop else None) or {}
    if ending.get("how") != End.RAISING:
        return ending
    later = max(_next_step(log) or 0, ended.get("step") or 0)
    went_on = ended.get("in_order") or later > (ending.get("step") or 0)
    return {} if went_on or not ended else ending


def _stack(
    newest: Mapping[str, Any], faults: str, log: RankLog | None
) -> tuple[list[CodeLine], Where | None]:
    """Position of the training thread, from faulthandler's output, its own records, or the last stack sample."""
    fault = stack_of(faulting_thread(faults))
    if fault:
        return fault, place_of(fault)
    stack = lines_of(newest.get("frames"))
    raised = newest.get("raised") or ()
    if raised and not stack:
        stack = lines_of(raised[0].get("frames"))
    where = place_of(lines_of(newest.get("user"))) or place_of(stack)
    if where is None and not raised and (_last_sample_ns(log) or 0) > (_last_end_ns(log) or 0):
        where = _last_sampled(log)
    return stack, where


def _last_sampled(log: RankLog | None) -> Where | None:
    if log is None or not len(log.samples) or (log.steps and log.samples[-1, 0] < log.steps[0].end_ns):
        return None
    seen = log.sample_where.get(int(log.samples[-1, 1]))
    return seen if seen is not None and is_user_line(seen) else None


def _next_step(log: RankLog | None) -> int | None:
    return log.steps[-1].number + 1 if log is not None and log.steps else None


def _last_end_ns(log: RankLog | None) -> int | None:
    return log.steps[-1].end_ns if log is not None and log.steps else None


def _last_sample_ns(log: RankLog | None) -> int | None:
    return int(log.samples[-1, 0]) if log is not None and len(log.samples) else None


def _recording(
    rank: int, info: Mapping[str, Any], stop: RankStop | None, newest: Mapping[str, Any], notes: list[Note]
) -> Recording | None:
    """The rank's flight recorder dump, or else the last sequence numbers of its groups."""
    known = _groups_of(info)
    if stop is not None and stop.flight is not None:
        read = read_dump(stop.flight, rank, known)
        if isinstance(read, Recording):
            return read
        notes.append(Note(read))
    groups = newest.get("groups") or {}
    counts = {
        known.get(name, GroupKey(name)): numbers[0]
        for name, numbers in groups.items()
        if numbers and numbers[0] >= 0
    }
    if not counts:
        return None
    path = stop.path if stop is not None else ""
    return Recording(rank, path, known, [], [], enqueued=counts, is_listed=False)


def _groups_of(info: Mapping[str, Any]) -> dict[str, GroupKey]:
    """The process groups in a rank's record. Gloo's flight recorder does not list their members."""
    found = {}
    for group in info.get("process_groups") or ():
        name, members = group.get("name"), group.get("ranks")
        if (
            isinstance(name, str)
            and isinstance(members, list)
            and all(isinstance(each, int) for each in members)
        ):
            found[name] = GroupKey(name, DEFAULT_DESCRIPTION if name == "0" else "", tuple(members))
    return found


_END_SIGNALS = POLITE | {signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGKILL}
"""Signals that end a job from outside, including those of resource limits and SIGKILL."""
_SHELL_EXIT_OFFSET = 128
"""A shell's exit code for a signal is its number plus this."""


class EndRequest(msgspec.Struct, frozen=True):
    """A request from outside to end the job."""

    signal: int | None
    """The signal; None if the job was killed together with its launcher, so that no signal was recorded."""
    at_ns: int | None = None
    """When the launcher received it, epoch ns; None if only the job's exit status shows it."""


def asked_to_end(
    job: JobEnd,
    records: Sequence[RankRecord],
    hosts: Sequence[HostStop],
    began_ns: int,
    *,
    all_in_order: bool,
) -> EndRequest | None:
    """How the job was ended from outside, from the launcher's record or the exit status; None if it was not. The exit status alone is not
    enough: torchrun exits with 1 after any signal. A signal did not end the job if all ranks ended in order (``all_in_order``) with exit
    code 0, or if a further attempt began (``began_ns``) after it."""
    heard = [
        EndRequest(host.asked["signal"], host.asked.get("at_ns"))
        for host in hosts
        if host.asked and host.asked.get("signal") is not None
        if (host.asked.get("at_ns") or began_ns) >= began_ns
    ]
    if heard and not (job.code == 0 and all_in_order):
        return min(heard, key=lambda each: each.at_ns or 0)
    sent = _END_SIGNALS & {job.signal, (job.code or 0) - _SHELL_EXIT_OFFSET, -(job.code or 0)}
    if sent:
        return EndRequest(int(min(sent)))
    killed = job.killed and records and all(is_running(record.info) is False for record in records)
    return EndRequest(None) if killed else None
