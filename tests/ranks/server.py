"""Runs as ``<ranks>``: one process with torch and without the hook. It forks an agent for each job, and the agent its ranks.

It has no thread and has run no backward pass, so that its forks are what a fresh interpreter is after ``import torch``. A rank returns
from :func:`serve`, and the interpreter's own way out is the rank's.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile

GRACE_S = 30.0
"""From SIGTERM to SIGKILL, as torchrun has it."""


def serve(address):
    """Jobs, one after the other; returns in a rank, with its script and arguments."""

    importlib.import_module("torch._dynamo")  # DDP's constructor needs it: two seconds in each rank
    door = socket.socket(socket.AF_UNIX)
    door.bind(address)
    door.listen(64)
    gc.collect()
    gc.freeze()
    os.write(1, b"ready\n")
    while True:
        readable, _, _ = select.select([door, 0], [], [], 1.0)
        _reap()
        if 0 in readable:
            os._exit(0)  # whoever started it has ended
        if door not in readable:
            continue
        connection, _ = door.accept()
        if os.fork() == 0:
            door.close()
            return _agent(connection)
        connection.close()


def _reap():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _agent(connection):
    """Start the ranks and look after them; returns in a rank."""
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    size, data = int.from_bytes(head, "little"), b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            os._exit(1)  # the command was killed before it had said all
        data += more
    order = json.loads(data.decode(errors="surrogateescape"))
    order["id"] = os.urandom(8).hex()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    waiting, ready = os.pipe()
    ranks = {}
    for rank in range(order["ranks"] or 1):
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.close(ready)
            os.setsid()
            port = os.read(waiting, 16)
            os.close(waiting)
            if not port:
                os._exit(1)
            return _rank(order, rank, int(port))
        ranks[pid] = rank
    os.close(waiting)
    os._exit(_watch(connection, ranks, order, ready))


def _watch(connection, ranks, order, ready):
    """The exit code, once all ranks have ended."""
    import time

    from torch.distributed import TCPStore

    # Its thread may only begin once the ranks have been forked.
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    os.write(ready, str(store.port).rjust(16).encode() * len(ranks))
    failed, kill_at_s, code = False, None, 0
    connection.setblocking(False)
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ranks.pop(pid)
            if status and not failed:
                # One process alone ends as it ended; signals as Python writes them.
                failed, code = True, 1 if order["ranks"] else os.waitstatus_to_exitcode(status)
                _signal(ranks, signal.SIGTERM)
                kill_at_s = time.monotonic() + GRACE_S
            continue
        select.select([connection], [], [], 0.01)
        try:
            told = connection.recv(1)
        except BlockingIOError:
            told = None
        if told is not None and not told:
            _signal(ranks, signal.SIGKILL)  # the command was killed
            return 1
        if told:
            failed, code = True, 1
            _signal(ranks, told[0])
            kill_at_s = time.monotonic() + GRACE_S
        if kill_at_s is not None and time.monotonic() > kill_at_s:
            _signal(ranks, signal.SIGKILL)
    connection.setblocking(True)
    connection.sendall(code.to_bytes(4, "little", signed=True))
    return 0


def _signal(ranks, number):
    for pid in ranks:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def _rank(order, rank, port):
    """Make this process what a rank is when its script begins."""
    size = str(order["ranks"])
    os.environ.clear()
    os.environ.update(order["environment"])
    if order["ranks"]:
        _set_variables(order, rank, size, port)
    os.chdir(order["folder"])
    tempfile.tempdir = None  # found by the server's TMPDIR, once torch has asked
    script, *_ = order["argv"]
    sys.argv[:] = order["argv"]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[1:1] = paths
    for path in paths:
        own = os.path.join(path, "sitecustomize.py")
        if os.path.exists(own):
            runpy.run_path(own)
            break
    _finish_import()
    return script


def _set_variables(order, rank, size, port):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size,
        GROUP_RANK="0",
        GROUP_WORLD_SIZE="1",
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=size,
        ROLE_NAME="default",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID=order["id"],
        TORCHELASTIC_SIGNALS_TO_HANDLE="SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        TORCH_NCCL_ASYNC_ERROR_HANDLING="1",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )


def _finish_import():
    """The hook waits for an import of torch, which was made before: what its finder does after that."""
    finder = sys.modules.get("_ddpdoctor.hook.finder")
    wanted = finder and finder._awaited.pop("torch", None)
    if wanted:
        try:
            getattr(importlib.import_module(wanted[0]), wanted[1])()
        except Exception:
            pass


script = serve(sys.argv[1])
runpy.run_path(script, run_name="__main__")
