"""Who may ask for metrics, and what clients can do that are slow, many, or not scrapers at all."""

import errno
import os
import socket
import threading
import time
from contextlib import closing, contextmanager

import pytest

from ddpdoctor.telemetry import scrapes
from ddpdoctor.telemetry.scrapes import MOST_CLIENTS, MOST_REQUEST_BYTES, Scrapes

ASKED = "GET /metrics HTTP/1.1\r\nHost: {}\r\n\r\n"


@contextmanager
def served(page=lambda: "a 1\n", listener=None, named="127.0.0.1"):
    """Its port."""
    listener = listener or socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    ended, end = os.pipe()
    thread = threading.Thread(target=Scrapes(listener, page, named).serve, args=(ended,))
    thread.start()
    try:
        yield port
    finally:
        os.close(end)
        thread.join(10)
        os.close(ended)
        assert not thread.is_alive()


def ask(port, request, timeout_s=10):
    """All that comes back, and b"" where the connection is reset."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout_s)) as client:
        try:
            client.sendall(request if isinstance(request, bytes) else request.encode())
            received = b""
            while piece := client.recv(1 << 16):
                received += piece
        except ConnectionError:
            return b""
    return received


def status(port, request):
    return int(ask(port, request).split()[1])


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1", 200), ("127.0.0.1:9400", 200), ("localhost:9400", 200), ("LOCALHOST.", 200), ("[::1]:9400", 200),
        ("10.1.2.3:9400", 200), (socket.gethostname(), 200), (f"{socket.gethostname().upper()}:80", 200), ("named.example:1", 200),
        ("evil.example", 421), ("localhost.evil.example", 421), ("127.0.0.1.evil.example:9400", 421), ("", 421), ("[::1", 421),
        (f"{socket.gethostname()}.evil.example", 421), ("127.0.0.1\r\nHost: evil.example", 400),
    ],
)  # fmt: skip
def test_a_name_that_was_made_to_lead_here_gets_nothing(host, code):
    with served(named="named.example") as port:
        assert status(port, ASKED.format(host)) == code


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ("GET /metrics?name=a HTTP/1.1\r\nhost: localhost\r\n\r\n", 200),
        ("HEAD /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n", 200),
        ("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        ("GET http://localhost/metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        ("GET /metrics/../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        ("POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc", 405),
        ("GET /metrics HTTP/1.1\r\n\r\n", 400),
        ("GET /metrics\r\n\r\n", 400),
        ("\0\r\n\r\n", 400),
        ("GET /" + "a" * MOST_REQUEST_BYTES, 431),
        ("GET /metrics HTTP/1.1\r\n" + "A: b\r\n" * MOST_REQUEST_BYTES, 431),
    ],
)
def test_only_the_metrics_are_there_and_only_to_be_read(request_, code):
    with served() as port:
        received = ask(port, request_)
        # What was sent beyond the bound is not read, so the connection may end with a reset.
        assert int(received.split()[1]) == code if received else code == 431
        assert received.endswith(b"a 1\n") == (code == 200 and request_.startswith("GET"))


def test_whoever_sends_byte_by_byte_is_cut_off_at_one_deadline(monkeypatch):
    monkeypatch.setattr(scrapes, "DEADLINE_S", 0.5)
    with served() as port, closing(socket.create_connection(("127.0.0.1", port), 10)) as slow:
        began_s = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - began_s < 30:
                slow.sendall(b"a")
                time.sleep(0.02)


def test_whoever_does_not_read_its_answer_is_cut_off_too(monkeypatch):
    monkeypatch.setattr(scrapes, "DEADLINE_S", 0.5)
    with (
        served(lambda: "a" * (64 << 20)) as port,
        closing(socket.create_connection(("127.0.0.1", port), 10)) as deaf,
    ):
        deaf.sendall(ASKED.format("localhost").encode())
        time.sleep(1.5)
        read = 0
        with pytest.raises(ConnectionError):
            while piece := deaf.recv(1 << 20):
                read += len(piece)
            raise ConnectionResetError
        assert read < 64 << 20


def test_a_scrape_is_answered_beside_many_that_only_hold_on():
    """More at a time than are kept: the oldest go, and no descriptors."""
    with served() as port:
        before = len(os.listdir("/proc/self/fd"))
        held = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(4 * MOST_CLIENTS)]
        for client in held:
            client.sendall(b"GET /metr")
        for _ in range(5):
            assert status(port, ASKED.format("localhost")) == 200
        mine = len(held)
        assert len(os.listdir("/proc/self/fd")) - before - mine <= MOST_CLIENTS
        for client in held:
            client.close()


class Exhausted(socket.socket):
    """A listening socket of a process that has no descriptor left."""

    asked = 0
    until = 0

    def accept(self):
        Exhausted.asked += 1
        if Exhausted.asked <= Exhausted.until:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_without_descriptors_it_rests_before_it_accepts_again(monkeypatch):
    monkeypatch.setattr(scrapes, "ACCEPT_PAUSE_S", 0.2)
    listener = Exhausted(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    Exhausted.asked, Exhausted.until = 0, 3
    with served(listener=listener) as port:
        began_s = time.monotonic()
        assert status(port, ASKED.format("localhost")) == 200
        assert time.monotonic() - began_s >= 0.6 and Exhausted.asked <= 5


def test_a_page_that_cannot_be_made_is_said_and_the_next_one_is_served():
    pages = iter(["", "a 1\n"])

    def page():
        return next(pages) or 1 / 0

    with served(page) as port:
        assert status(port, ASKED.format("localhost")) == 500
        assert status(port, ASKED.format("localhost")) == 200
