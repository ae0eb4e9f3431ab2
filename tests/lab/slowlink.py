"""A slow link between two hosts: network namespaces with host names of their own and a real rate limit between them.

Needs root, ``ip`` and ``tc``; where they are missing or not allowed the case is left out and says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from ddpdoctor.analysis import analyze

from .cases import Case
from .judging import Expected, judge
from .planting import Plant
from .running import Job, Recorded, environment, write
from .trial import Outcome

_RULES = (
    "allreduce/communication-bound",
    "allreduce/slow-transfer",
    "allreduce/slow-link",
    "allreduce/not-overlapped",
)
_WIDTH = 200
"""Gives the mlp 0.4 MB of gradients."""


@dataclass
class Hosts:
    """Two namespaces with a cable between them."""

    names: list[str] = field(default_factory=lambda: [f"lab{os.getpid()}{end}" for end in "ab"])
    devices: list[str] = field(default_factory=lambda: [f"lab{os.getpid() % 100000}{end}" for end in "ab"])
    addresses: tuple[str, str] = ("10.213.7.1", "10.213.7.2")


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def why_not() -> str | None:
    """Why network namespaces cannot be had here; None where they can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "tc", "unshare", "hostname") if not shutil.which(tool)]
    return f"needs {', '.join(missing)}" if missing else None


@contextlib.contextmanager
def two_hosts(megabits: float | None) -> Iterator[Hosts]:
    """Two hosts; ``megabits`` per second between them (None: as fast as it goes)."""
    hosts = Hosts()
    try:
        for name in hosts.names:
            _do("ip", "netns", "add", name)
        _do("ip", "link", "add", hosts.devices[0], "type", "veth", "peer", "name", hosts.devices[1])
        for name, device, address in zip(hosts.names, hosts.devices, hosts.addresses, strict=True):
            _do("ip", "link", "set", device, "netns", name)
            _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            _do("ip", "-n", name, "link", "set", device, "up")
            _do("ip", "-n", name, "link", "set", "lo", "up")
            if megabits is not None:
                limit = ("tbf", "rate", f"{megabits:g}mbit", "burst", "32kb", "latency", "400ms")
                _do("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, "root", *limit)
        yield hosts
    finally:
        for name in hosts.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def record_on(hosts: Hosts, folder: Path, job: Job, random: Random) -> Recorded:
    """Half of the ranks on each host, each half under its own ``ddpdoctor run``; both recordings are joined."""
    script = write(folder, job, [Plant()])
    port = str(random.randrange(20000, 32000))
    started = []
    for node, (name, device) in enumerate(zip(hosts.names, hosts.devices, strict=True)):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)]
        torchrun += [
            "--nproc-per-node",
            str(job.ranks // 2),
            "--master-addr",
            hosts.addresses[0],
            "--master-port",
            port,
        ]
        line = [
            *torchrun,
            str(script),
            "--steps",
            str(job.steps),
            "--step-ms",
            str(job.step_ms),
            "--width",
            str(_WIDTH),
        ]
        run = [
            sys.executable,
            "-m",
            "ddpdoctor",
            "run",
            "--out",
            str(folder / f"run-{node}"),
            "--no-analysis",
            "--",
            *line,
        ]
        inside = [
            "ip",
            "netns",
            "exec",
            name,
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname {name}; exec "$@"',
            "sh",
            *run,
        ]
        log = (folder / f"output-{node}.txt").open("w")
        started.append(
            subprocess.Popen(
                inside, cwd=folder, env=environment() | {"GLOO_SOCKET_IFNAME": device}, stdout=log, stderr=log
            )
        )
    try:
        for process in started:
            process.wait(timeout=240)
    finally:
        for process in started:
            process.kill()
    return Recorded(folder, script, analyze([str(folder / "run-0"), str(folder / "run-1")]))


def slow_link_outcome(folder: Path, seed: int) -> list[Outcome]:
    """A fast cable must be silent, a slow one be named."""
    if reason := why_not():
        print(f"slow-link left out: {reason}")
        return []
    random = Random(seed)
    ranks = random.choice((2, 4))
    job = Job("mlp", ranks, 40.0)
    outcomes: list[Outcome] = []
    fast_ms = None
    for name, megabits in (("fast-link", None), ("slow-link", random.uniform(80, 200))):
        size = "healthy" if megabits is None else "strong"
        outcome = Outcome(Case(name, job, seed, size), folder=folder / name)
        outcomes.append(outcome)
        outcome.expected = Expected() if megabits is None else Expected(_RULES, has_line=False)
        if megabits is not None and ranks > 2:
            outcome.expected = Expected(_RULES, any_ranks=True, has_line=False)
        try:
            with two_hosts(megabits) as hosts:
                recorded = record_on(hosts, folder / name, job, random)
            outcome.step_ms = recorded.step_ms
            outcome.truth_ms = None if fast_ms is None else recorded.step_ms - fast_ms
            fast_ms = recorded.step_ms
            outcome.judgement = judge(recorded.diagnosis, outcome.expected, recorded.script.read_text())
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.load = os.getloadavg()[0]
    return outcomes
