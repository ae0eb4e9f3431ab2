"""Starts the ranks of a job by forking a process that has imported torch already, as ``torchrun`` would start them.

``import torch`` takes five seconds of processor time, for torchrun and for each rank, and ``torch._dynamo``, which DDP imports, two.
:func:`forked` gives a command that takes the place of ``torchrun --standalone --nproc-per-node N SCRIPT ARGUMENTS`` where the launcher is
not what is tested: the same variables, a session for each rank, the launcher's store, SIGTERM to the other ranks once one has failed,
exit code 1 then. ``test_ranks.py`` shows that the same is recorded and diagnosed. What differs: ``/proc/PID/environ`` and the command
line of a rank are the server's, its parent is no child of ``ddpdoctor run``, and a killed command takes its ranks along.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent
_JOBS = _HERE.parent / "jobs"


def forked(script: str | Path, *arguments: str, ranks: int = 2) -> list[str]:
    """A command that runs a script, of ``tests/jobs`` if its path is relative, in ``ranks`` forked ranks; 0: in one process that is
    not told of any."""
    client = [sys.executable, "-E", "-S", str(_HERE / "client.py"), _server(os.getpid())]
    return [*client, str(ranks), str(_JOBS / script), *arguments]


@cache
def _server(pid: int) -> str:
    """The address of this process's server, which ends with it; ``pid`` so that a fork of this process has its own."""
    folder = tempfile.mkdtemp(prefix="ddpdoctor-ranks-")
    address = str(Path(folder) / "socket")
    # What runs below the script is hidden from the lines that are reported, as the frames of Python's own modules are.
    program = f"exec(compile(open({str(_HERE / 'server.py')!r}).read(), '<ranks>', 'exec'))"
    environment = {name: text for name, text in os.environ.items() if not name.startswith("DDPDOCTOR_")}
    environment |= {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99", "PYTHONDONTWRITEBYTECODE": "1"}
    server = subprocess.Popen(
        [sys.executable, "-c", program, address],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert server.stdin is not None and server.stdout is not None
    if server.stdout.readline() != b"ready\n":
        raise RuntimeError("the server of forked ranks did not start")

    def end() -> None:
        if os.getpid() == pid:
            server.terminate()
            server.wait()
            for path in Path(folder).iterdir():
                path.unlink()
            os.rmdir(folder)

    atexit.register(end)
    return address
