"""Answers scrapes over HTTP in one thread, with a limit on connections and a deadline for each.

The standard library's HTTP servers, which prometheus_client also uses, start a thread for every connection, have no deadline for a client
that sends slowly, and accept any Host header.
"""

from __future__ import annotations

import re
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urlsplit

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_CLIENTS = 32
"""Most open connections. A further one replaces the oldest, because scrapers send their requests at once."""
DEADLINE_S = 5.0
"""Time limit of a connection. Prometheus's default timeout is 10 s."""
MOST_REQUEST_BYTES = 8192
"""Longest request line with all headers; Prometheus sends 300 bytes."""
ACCEPT_PAUSE_S = 1.0
"""Pause after a failed accept, usually for lack of file descriptors. Without it, poll would return at once, again and again."""
_PIECE_BYTES = 1 << 16
_REQUEST = re.compile(rb"([A-Z]{1,16}) (\S+) HTTP/1\.[01]")


class _Client:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.ends_s = time.monotonic() + DEADLINE_S
        self.request = b""
        self.answer: memoryview | None = None
        """The part not yet sent; None until the request is complete."""


class Scrapes:
    """Serves one page at :data:`PATH` on a listening socket, which is closed at the end.

    To prevent DNS rebinding, a request is answered only if its Host header is this host's name or an IP address.
    """

    def __init__(self, listener: socket.socket, page: Callable[[], str], named: str) -> None:
        """``named``: the name or address that the user gave to listen on."""
        self._listener, self._page = listener, page
        self.port: int = listener.getsockname()[1]
        self._clients: dict[int, _Client] = {}
        """Clients by file descriptor, the oldest first."""
        self._accepts_from_s = 0.0
        self._host = socket.gethostname().lower()
        self._names = {"localhost", self._host, self._host.partition(".")[0], named.lower()}
        self._has_full_name = False

    def serve(self, ended: int) -> None:
        """Answer requests until the descriptor ``ended`` is readable or its other end is closed."""
        self._listener.setblocking(False)
        while ended not in (ready := self._ready(ended)):
            for descriptor in ready:
                if descriptor in self._clients:
                    self._continue(descriptor)
            if self._listener.fileno() in ready:
                self._accept()
            for descriptor in [
                each for each, client in self._clients.items() if client.ends_s <= time.monotonic()
            ]:
                self._drop(descriptor)
        for descriptor in list(self._clients):
            self._drop(descriptor)
        self._listener.close()

    def _ready(self, ended: int) -> set[int]:
        poll, now_s = select.poll(), time.monotonic()
        poll.register(ended, select.POLLIN)
        deadlines_s = [client.ends_s for client in self._clients.values()]
        if self._accepts_from_s > now_s:
            deadlines_s.append(self._accepts_from_s)
        else:
            poll.register(self._listener, select.POLLIN)
        for descriptor, client in self._clients.items():
            poll.register(descriptor, select.POLLOUT if client.answer else select.POLLIN)
        wait_ms = 1 + 1000 * max(0.0, min(deadlines_s) - now_s) if deadlines_s else None
        return {descriptor for descriptor, _ in poll.poll(wait_ms)}

    def _accept(self) -> None:
        if len(self._clients) >= MOST_CLIENTS:
            self._drop(next(iter(self._clients)))
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            self._accepts_from_s = time.monotonic() + ACCEPT_PAUSE_S
            return
        connection.setblocking(False)
        self._clients[connection.fileno()] = _Client(connection)

    def _drop(self, descriptor: int) -> None:
        self._clients.pop(descriptor).connection.close()

    def _continue(self, descriptor: int) -> None:
        client = self._clients[descriptor]
        try:
            if client.answer:
                client.answer = client.answer[client.connection.send(client.answer) :]
                if not client.answer:
                    # Closing at once resets the connection if unread data is left, and the answer is lost.
                    client.connection.shutdown(socket.SHUT_WR)
                return
            piece = client.connection.recv(_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            self._drop(descriptor)
        elif client.answer is None:
            client.request += piece
            self._handle_request(client)

    def _handle_request(self, client: _Client) -> None:
        head, end, _ = client.request.partition(b"\r\n\r\n")
        if not end and len(head) <= MOST_REQUEST_BYTES:
            return
        status = self._status(head)
        body = status.phrase + "\n"
        if status is HTTPStatus.OK:
            try:
                body = self._page()
            except Exception:
                status = HTTPStatus.INTERNAL_SERVER_ERROR
                body = status.phrase + "\n"
        client.answer = memoryview(_answer(status, body.encode(), with_body=not head.startswith(b"HEAD ")))

    def _status(self, head: bytes) -> HTTPStatus:
        if len(head) > MOST_REQUEST_BYTES:
            return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        line, *headers = head.split(b"\r\n")
        request = _REQUEST.fullmatch(line)
        hosts = [
            value.strip()
            for name, _, value in (each.partition(b":") for each in headers)
            if name.lower() == b"host"
        ]
        if request is None or len(hosts) != 1:
            return HTTPStatus.BAD_REQUEST
        if not self._is_own_name(hosts[0].decode("latin-1")):
            return HTTPStatus.MISDIRECTED_REQUEST
        if request[2].partition(b"?")[0] != PATH.encode():
            return HTTPStatus.NOT_FOUND
        return HTTPStatus.OK if request[1] in (b"GET", b"HEAD") else HTTPStatus.METHOD_NOT_ALLOWED

    def _is_own_name(self, host: str) -> bool:
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        with suppress(ValueError):
            ip_address(name)
            return True
        if name not in self._names and not self._has_full_name:
            # Looked up only once, because it takes many seconds if DNS does not answer.
            self._has_full_name = True
            self._names.add(socket.getfqdn(self._host).lower())
        return name in self._names


def _answer(status: HTTPStatus, body: bytes, with_body: bool) -> bytes:
    headers = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {CONTENT_TYPE}",
        f"Content-Length: {len(body)}",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append("Allow: GET, HEAD")
    return "\r\n".join([*headers, "", ""]).encode("latin-1") + (body if with_body else b"")
