"""The command in torchrun's place: hands its environment, folder and streams to the server, and ends as the job does."""

import json
import os
import signal
import socket
import sys


def main() -> None:
    address, ranks, *argv = sys.argv[1:]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    order = {"ranks": int(ranks), "argv": argv, "environment": dict(os.environ), "folder": os.getcwd()}
    data = json.dumps(order).encode(errors="surrogateescape")
    socket.send_fds(connection, [len(data).to_bytes(8, "little")], [0, 1, 2])
    connection.sendall(data)
    # Whatever it is sent, the agent passes on to the ranks.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
    answer = connection.recv(4)
    if not answer:
        sys.exit("the server of forked ranks has gone")
    code = int.from_bytes(answer, "little", signed=True)
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


main()
