"""Bytes that a rank sends or receives are work, whichever of its threads moves them."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from ddpdoctor.telemetry import procfs
from ddpdoctor.telemetry.procfs import Sockets

MANY = 200_000


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        with one, other:
            yield one, other


def exchange(one: socket.socket, other: socket.socket) -> None:
    thread = threading.Thread(target=one.sendall, args=(bytes(MANY),))
    thread.start()
    left = MANY
    while left:
        left -= len(other.recv(1 << 16))
    thread.join()


def counts(of: socket.socket) -> int:
    return Sockets().bytes_of(os.getpid()).get(os.fstat(of.fileno()).st_ino, -1)


def test_each_socket_is_counted(pair) -> None:
    one, other = pair
    assert (counts(other), counts(one) <= 1) == (0, True), "the kernel tells of none here"
    exchange(one, other)
    assert counts(other) == MANY
    assert counts(one) >= MANY // 2, "what is on its way is not acknowledged yet"
    with socket.socketpair()[0] as local:
        assert counts(local) == -1


def test_an_upload_from_memory_is_work(pair, monkeypatch) -> None:
    """Neither the first thread's wakes nor the bytes of its files tell: no other source may."""
    monkeypatch.setattr(procfs, "MOVED_BYTES", 1 << 40)
    monkeypatch.setattr(procfs, "_sockets", Sockets())
    monkeypatch.setattr("ddpdoctor.telemetry.procfs._REUSE_S", 0.0)
    meter = procfs.Meter(os.getpid())
    monkeypatch.setattr(meter, "_works", lambda *_: False)
    meter.update(None)
    meter.update(None)
    assert not meter.moves
    exchange(*pair)
    meter.update(None)
    assert meter.moves
    meter.clear()
    meter.update(None)
    meter.update(None)
    assert not meter.moves, "the rank has made progress: what it moved before does not count"
