"""One process without threads that has imported what commands need, and forks one for each command, one after the other."""

import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys

WARM = (
    *(
        f"cli.{verb}"
        for verb in (
            "analyze",
            "compare",
            "digest",
            "doctor",
            "export",
            "history",
            "rules",
            "trials",
            "watch",
        )
    ),
    *(f"report.{name}" for name in ("html", "junit", "markdown", "redaction", "sarif", "charts")),
    *("analysis", "measure.pipeline", "stall.evidence", "trace", "experiment"),
)


def serve(server):
    """Commands, one after the other; returns in a child, which is ready to run one."""
    from ddpdoctor.cli import main

    # What an analysis sets before numpy is imported.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for name in WARM:
        importlib.import_module(f"ddpdoctor.{name}")
    for name in ("cel", "jinja2.sandbox", "numpy", "yaml", "rich.markdown", "rich.progress"):
        importlib.import_module(name)
    from ddpdoctor.report.html import page_environment

    page_environment().get_template("compare.html.j2")
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    gc.collect()
    gc.freeze()
    server.sendall(b"ready")
    while True:
        head, streams, _, _ = socket.recv_fds(server, 8, 3)
        if not head:
            os._exit(0)  # whoever started it has ended
        size, data = int.from_bytes(head, "little"), b""
        while len(data) < size:
            more = server.recv(size - len(data))
            if not more:
                os._exit(0)
            data += more
        child = os.fork()
        if child == 0:
            server.close()
            become(json.loads(data), streams)
            return main
        for stream in streams:
            os.close(stream)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        server.sendall(code.to_bytes(4, "little", signed=True))


def become(order, streams):
    """Make this process what a fresh one is when its command begins."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.argv[:] = order["argv"]
    if order["most_bytes"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (order["most_bytes"],) * 2)
    signal.setitimer(signal.ITIMER_REAL, order["most_s"])


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))()
