"""Commands of ddpdoctor, each in a fork of a process that has imported what they need (but polars, which starts threads).

For tests of what a command says and writes. What it imports, its streams and signals, and ``run`` are tested with a Python of their own;
``test_commands.py`` shows that both end alike.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SERVER = Path(__file__).with_name("server.py")


def command(
    *arguments: object,
    cwd: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    most_bytes: int | None = None,
    timeout_s: float = 120,
) -> subprocess.CompletedProcess[str]:
    """``ddpdoctor ARGUMENTS``, as ``subprocess.run`` would; it can write no file of more than ``most_bytes``."""
    argv = ["ddpdoctor", *map(str, arguments)]
    order = {
        "argv": argv,
        "folder": str(cwd or os.getcwd()),
        "environment": {**os.environ, "PYTHONPATH": str(ROOT)} if environment is None else dict(environment),
        "most_bytes": most_bytes,
        "most_s": timeout_s,
    }
    data = json.dumps(order).encode()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
        server = _server(os.getpid())
        socket.send_fds(
            server, [len(data).to_bytes(8, "little")], [each.fileno() for each in (nothing, out, err)]
        )
        server.sendall(data)
        answer = server.recv(4)
        if not answer:
            raise RuntimeError("the server of commands has gone")
        code = int.from_bytes(answer, "little", signed=True)
        said = []
        for stream in (out, err):
            stream.seek(0)
            said.append(stream.read().decode())
    if code == -signal.SIGALRM:
        raise subprocess.TimeoutExpired(argv, timeout_s, *said)
    return subprocess.CompletedProcess(argv, code, *said)


@cache
def _server(pid: int) -> socket.socket:
    """A connection to this process's server, which ends with it; ``pid`` so that a fork of this process has its own."""
    ours, theirs = socket.socketpair()
    # Nothing of the tests' own environment is to be seen by what is imported.
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("DDPDOCTOR_", "XDG_"))}
    server = subprocess.Popen(
        [sys.executable, str(_SERVER), str(theirs.fileno())],
        env={**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    if ours.recv(5) != b"ready":
        raise RuntimeError("the server of commands did not start")

    def end() -> None:
        if os.getpid() == pid:
            ours.close()
            server.wait()

    atexit.register(end)
    return ours
