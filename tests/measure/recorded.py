"""Run directories written by hand: a small simulation of data parallel training, in the files that the hook writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddpdoctor.analysis import Options, load
from ddpdoctor.measure.flow import measure
from ddpdoctor.rundir.layout import claim_rank_directory
from ddpdoctor.rundir.owned import folder as opened
from tests.measure.traced import reckoned

EPOCH_NS = 1_760_000_000_000_000_000
MS = 1_000_000
LINES = {1: ("train.py", 20, "main"), 2: ("train.py", 31, "main"), 3: ("model.py", 7, "forward")}


@dataclass(frozen=True)
class Job:
    """A job of CPU ranks over Gloo. Times in ms; ``extra(rank, step)`` gives what a rank does longer, by phase: its own
    code is ``before``, ``host``, the ``save``, ``after`` and ``behind``, in this order. With ``meet`` of any rank all meet in a barrier
    behind ``before``, with ``then_meet`` behind ``after``."""

    world: int = 4
    steps: int = 30
    data: float = 2.0
    forward: float = 5.0
    backward: float = 10.0
    transfer: float = 1.0
    optimizer: float = 1.0
    host: float = 0.5
    extra: Callable[[int, int], dict[str, float]] = lambda rank, step: {}
    accumulation: int = 1
    no_sync: bool = True
    ddp: bool = True
    buffers: bool = False
    barrier: bool = False
    gather: float = 0.0
    """Of sharded parameters, before the forward; 0: each rank has all of them."""
    metric: str = ""
    """"": none, "blocking" or "async": an all_reduce between forward and backward."""
    in_flight: int = 1
    """Number of asynchronous all_reduces, all started before the first wait."""
    batch: Callable[[int], int] = lambda rank: 32
    elements: Callable[[int, int], int] | None = None
    """Elements of a rank's inputs in a step."""
    worker: Callable[[int], float] | None = None
    """Time that the one loader worker of a rank takes for a batch, which it makes beside the steps."""
    epoch: int = 0
    """Steps after which the job evaluates and its loader starts new workers."""
    evaluation: float = 50.0
    evaluates_module: bool = False
    """Whether it evaluates the module inside DDP, whose forwards nobody sees."""
    evaluators: tuple[int, ...] | None = None
    """The ranks that do; None: all."""
    restart: float = 0.0
    """Time until new workers have the first batch."""
    hosts: tuple[str, ...] = ()
    """By rank; all on one host where empty."""
    offset_ns: dict[str, int] = field(default_factory=dict)
    drift_ppm: dict[str, float] = field(default_factory=dict)
    marks: Callable[[int, int], list[str]] = lambda rank, step: []
    job_id: str = "job"
    attempt: int = 0

    def host_of(self, rank: int) -> str:
        return self.hosts[rank] if self.hosts else "node0"

    def changed(self, **fields) -> Job:
        return replace(self, **fields)


PREFETCH = 2


class _Worker:
    """One loader worker process with PREFETCH batches on order. Times in ms since the job's start."""

    def __init__(self, pace: float) -> None:
        self.pace, self.asked = pace, 0
        self.ready = [pace * (n + 1) for n in range(PREFETCH)]

    def next(self, now: float) -> tuple[float, int]:
        """When the batch asked for at ``now`` is there, and how many stood ready then."""
        waiting = sum(at <= now for at in self.ready)
        got = max(now, self.ready.pop(0))
        self.ready.append(max(got, self.ready[-1]) + self.pace)
        return got, waiting


class _Rank:
    """One rank's clock and lines. ``now`` is the true time in ms since the job's start."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.now = job, rank, 0.0
        self.start, self.events, self.lines = 0.0, [], []
        self.worker = _Worker(job.worker(rank)) if job.worker else None
        self.lines.append({"schema": "ddpdoctor.steps/2"})
        for number, (file, line, function) in LINES.items():
            self.lines.append({"where": number, "file": file, "line": line, "function": function})

    def local_ns(self, ms: float) -> int:
        host = self.job.host_of(self.rank)
        drift = self.job.drift_ppm.get(host, 0.0) * 1e-6
        return EPOCH_NS + self.job.offset_ns.get(host, 0) + round(ms * MS * (1 + drift))

    def event(self, kind: str, start: float, **fields) -> dict:
        entry = {"k": kind, "s": self.ns(start), "d": round((self.now - start) * MS), **fields}
        self.events.append(entry)
        return entry

    def ns(self, ms: float) -> int:
        return round((ms - self.start) * MS)

    def spend(self, kind: str, ms: float, **fields) -> None:
        start, self.now = self.now, self.now + ms
        if kind:
            self.event(kind, start, **fields)

    def load(self, ms: float) -> None:
        """Take a batch from the loader, which makes it in ``ms`` or has a worker for that."""
        fields = {"w": 1, "l": 0, "n": self.job.batch(self.rank)}
        if self.worker:
            got, fields["q"] = self.worker.next(self.now)
            ms += got - self.now
        self.spend("data", ms, **fields)

    def close(self, step: int) -> None:
        times = [self.local_ns(self.start), self.local_ns(self.now)]
        line = {"step": step, "t": times, "cpu": 1, "runq": 0, "ev": self.events}
        self.lines.append({**line, "marks": self.job.marks(self.rank, step)})
        self.start, self.events = self.now, []


def run_ranks(job: Job) -> list[list[dict]]:
    """Simulate; the lines of each rank's steps.jsonl."""
    ranks = [_Rank(job, rank) for rank in range(job.world)]
    for step in range(job.steps):
        for micro in range(job.accumulation):
            _iteration(job, ranks, step, micro == job.accumulation - 1)
        for r in ranks:
            r.spend("opt", job.optimizer + job.extra(r.rank, step).get("optimizer", 0.0), w=2, o=0)
            r.close(step)
    return [r.lines for r in ranks]


def _evaluate(job: Job, r: _Rank) -> None:
    if job.evaluates_module:
        r.spend("data", 0.1, w=1, l=1, n=8)
        r.spend("", job.evaluation)
    else:
        r.spend("eval", job.evaluation, n=5)


def _iteration(job: Job, ranks: list[_Rank], step: int, last: bool) -> None:
    extras = [job.extra(r.rank, step) if last else {} for r in ranks]
    for r, extra in zip(ranks, extras, strict=True):
        fresh = job.epoch and step and step % job.epoch == 0
        if fresh:
            if job.evaluators is None or r.rank in job.evaluators:
                _evaluate(job, r)
            r.spend("iter", 1.0, l=0, w=1)
        r.load(job.data + extra.get("data", 0.0) + (job.restart if fresh else 0.0))
        r.spend("", extra.get("before", 0.0))
    if any(extra.get("meet") for extra in extras):
        _meet(ranks, "bar", 0.05, op="barrier")
    for r, extra in zip(ranks, extras, strict=True):
        r.spend("", job.host + extra.get("host", 0.0))
        if extra.get("save"):
            r.spend("save", extra["save"], w=2)
        r.spend("", extra.get("after", 0.0))
    if job.barrier or any(extra.get("then_meet") for extra in extras):
        _meet(ranks, "bar", 0.05, op="barrier")
    for r, extra in zip(ranks, extras, strict=True):
        r.spend("", extra.get("behind", 0.0))
    if job.gather:
        _meet(ranks, "coll", job.gather, op="all_gather_single", b=4_000_000)
    sync = last or not job.no_sync
    root = ranks[0].now
    for r, extra in zip(ranks, extras, strict=True):
        if job.buffers and sync:
            r.spend("bcast", max(0.0, root - r.now) + 0.02, m=0)
        size = {"e": job.elements(r.rank, step)} if job.elements else {}
        r.spend("fwd", job.forward + extra.get("forward", 0.0), m=0, w=3, **size)
        if extra.get("gc"):
            r.spend("gc", extra["gc"], g=2)
    if job.metric == "blocking":
        _meet(ranks, "coll", 0.2, op="all_reduce")
    elif job.metric == "async":
        for r in ranks:
            for _ in range(job.in_flight):
                r.spend("coll", 0.01, op="all_reduce", pg="0", b=4, w=2, **{"async": True})
        for _ in range(job.in_flight):
            _wait(ranks)
    _backward(job, ranks, extras, sync and job.ddp)
    if not job.ddp and last:
        _meet(ranks, "coll", job.transfer, op="all_reduce", b=4_000_000)


def _backward(job: Job, ranks: list[_Rank], extras: list[dict], sync: bool) -> None:
    starts = [r.now for r in ranks]
    lengths = [job.backward + extra.get("backward", 0.0) for extra in extras]
    arrivals = [start + length for start, length in zip(starts, lengths, strict=True)]
    for r, start, length in zip(ranks, starts, lengths, strict=True):
        r.now = max(arrivals) + job.transfer if sync else start + length
        fields = {"m": 0, "sync": sync} if job.ddp else {}
        if sync:
            fields |= {"ready": [round(length * MS / 2), round(length * MS)], "base": r.ns(start)}
        r.event("bwd", start, w=2, **fields)


def _meet(ranks: list[_Rank], kind: str, transfer: float, **fields) -> None:
    together = max(r.now for r in ranks) + transfer
    for r in ranks:
        start, r.now = r.now, together
        r.event(kind, start, pg="0", w=2, **fields)


def _wait(ranks: list[_Rank]) -> None:
    together = max(r.now for r in ranks) + 0.2
    for r in ranks:
        start, r.now = r.now, together
        r.event("wait", start, op="all_reduce", w=2)


def describe(job: Job, rank: int) -> dict:
    """rank.json"""
    module = {"id": 0, "module": "Net", "where": 3, "bucket_cap_bytes": 26214400, "bucket_bytes": [4e6, 6e6]}
    module |= {
        "parameters_bytes": 10_000_000,
        "broadcast_buffers": True,
        "buffer_bytes": 512 if job.buffers else 0,
    }
    loader = {
        "id": 0,
        "where": 1,
        "num_workers": 1 if job.worker or job.epoch else 0,
        "prefetch_factor": PREFETCH if job.worker or job.epoch else None,
        "batch_size": job.batch(rank),
        "sampler": "DistributedSampler",
    }
    return {
        "schema": "ddpdoctor.rank/2",
        "rank": rank,
        "local_rank": rank,
        "world_size": job.world,
        "host": job.host_of(rank),
        "pid": 100 + rank,
        "attempt": job.attempt,
        "job_id": job.job_id,
        "started_ns": EPOCH_NS,
        "torch": "2.13.0",
        "backend": "gloo",
        "device": "cpu",
        "ddp": [module] if job.ddp else [],
        "fsdp": job.gather > 0,
        "loaders": [loader],
        "optimizers": [{"id": 0, "type": "SGD", "where": 2}],
    }


def record(folder: Path, job: Job, *, missing: tuple[int, ...] = ()) -> Path:
    """Write the run directory of a job; ranks in ``missing`` leave nothing behind."""
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"schema": "ddpdoctor.run/1", "world_size": job.world}))
    for rank, lines in enumerate(run_ranks(job)):
        if rank in missing:
            continue
        with opened(str(folder)) as run:
            place = folder / "ranks" / claim_rank_directory(run, rank)
        (place / "rank.json").write_text(json.dumps(describe(job, rank)))
        (place / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def measured(*folders: Path):
    """(Measurement, all notes) of run directories."""
    inputs = load([str(folder) for folder in folders], Options(cache=False))
    found = reckoned(measure([log for log in inputs.logs if log.steps], [], inputs.telemetry))
    recorded = {step.number for log in inputs.logs for step in log.steps}
    assert found.facts.steps.seen == len(recorded)
    return found, [*map(str, inputs.notes), *found.notes]


def late_facts(measurement) -> dict:
    """Facts under ``late`` that were found."""
    late = measurement.facts.late
    return {name: getattr(late, name) for name in late.__struct_fields__ if getattr(late, name) is not None}


def plant(rank: int, every: int = 1, **extra_ms: float) -> Callable[[int, int], dict[str, float]]:
    """``extra`` that acts on one rank."""
    return lambda r, step: extra_ms if r == rank and step % every == 0 else {}


def write_beside(folder, rank, lines, work_of):
    """A trace of steps 8 to 12 of a step log's ``lines``, of a job of two ranks: of each event of theirs the operators, (name, epoch ns,
    ms) each, that ``work_of`` gives for it and the epoch ns of its step's beginning."""
    events = []

    def add(category, name, at_ns, ms):
        times = {"ts": (at_ns - EPOCH_NS) / 1e3, "dur": ms * 1e3}
        events.append({"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, **times})

    for line in lines:
        if 8 <= line.get("step", -1) <= 12:
            start, end = line["t"]
            add("user_annotation", f"ProfilerStep#{line['step']}", start, (end - start) / 1e6)
            for event in line["ev"]:
                for operator in work_of(event, start):
                    add("cpu_op", *operator)
    text = {"baseTimeNanoseconds": EPOCH_NS, "distributedInfo": {"rank": rank, "world_size": 2}}
    (folder / f"rank{rank}.json").write_text(json.dumps({**text, "traceEvents": events}))
