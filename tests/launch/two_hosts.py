"""Two hosts on one machine: network namespaces with host names of their own and a link between them.

Needs root, ``ip`` and ``tc``; where they are missing or not allowed :func:`why_not` says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

PORT = "29517"
"""On the hosts' own network, where nobody else has it."""


@dataclass
class Hosts:
    """Two namespaces with a cable between them."""

    names: list[str] = field(default_factory=lambda: [f"host{os.getpid() % 100000}{end}" for end in "ab"])
    """Of the hosts, and of the network device of each."""
    addresses: tuple[str, str] = ("10.213.7.1", "10.213.7.2")

    def torchrun(self, node: int) -> list[str]:
        """torchrun for one rank on each of them, but for the script."""
        group = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node)]
        where = ["--master-addr", self.addresses[0], "--master-port", PORT]
        return [sys.executable, "-m", "torch.distributed.run", *group, *where]

    def on(self, node: int, command: list[str]) -> list[str]:
        """``command`` on one of them: with processes, a host name and memory-backed storage of its own."""
        prepare = f'hostname {self.names[node]}; mount -t tmpfs none /dev/shm; exec "$@"'
        alone = ["unshare", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        return ["ip", "netns", "exec", self.names[node], *alone, "sh", "-c", prepare, "sh", *command]


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def why_not() -> str | None:
    """Why network namespaces cannot be had here; None where they can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "tc", "unshare", "hostname") if not shutil.which(tool)]
    return f"needs {', '.join(missing)}" if missing else None


@contextlib.contextmanager
def two_hosts(megabits: float | None = None) -> Iterator[Hosts]:
    """Two hosts; ``megabits`` per second between them (None: as fast as it goes)."""
    hosts = Hosts()
    try:
        for name in hosts.names:
            _do("ip", "netns", "add", name)
        _do("ip", "link", "add", hosts.names[0], "type", "veth", "peer", "name", hosts.names[1])
        for name, address in zip(hosts.names, hosts.addresses, strict=True):
            _do("ip", "link", "set", name, "netns", name)
            _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", name)
            _do("ip", "-n", name, "link", "set", name, "up")
            _do("ip", "-n", name, "link", "set", "lo", "up")
            if megabits is not None:
                limit = ("tbf", "rate", f"{megabits:g}mbit", "burst", "32kb", "latency", "400ms")
                _do("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", name, "root", *limit)
        yield hosts
    finally:
        for name in hosts.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
