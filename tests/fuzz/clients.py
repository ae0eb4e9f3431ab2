"""Clients of the metrics that send anything, in any pieces, and leave at any moment; between them a scrape must be answered."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from ddpdoctor.telemetry.scrapes import MOST_CLIENTS, Scrapes

GOOD = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n"
PAGE = "a 1\n"
MOST_S = 3.0
"""For a good scrape, whoever else is connected; the rest of a connection has five."""
EVERY = 20
"""Clients between two good scrapes."""


def _sends_anything(client: socket.socket, chance: random.Random) -> None:
    client.sendall(chance.randbytes(chance.choice((1, 100, 20_000, 1 << 20))))


def _sends_nearly_a_request(client: socket.socket, chance: random.Random) -> None:
    text = bytearray(GOOD)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(text))
        text[at : at + chance.randint(0, 3)] = chance.choice(
            (b"", b"\r\n", b"\0", b":", b"a" * 9000, chance.randbytes(3))
        )
    client.sendall(text)


def _sends_a_part(client: socket.socket, chance: random.Random) -> None:
    client.sendall(GOOD[: chance.randrange(len(GOOD))])


def _asks_and_does_not_read(client: socket.socket, chance: random.Random) -> None:
    client.sendall(GOOD * chance.randint(1, 50))


def _half_closes(client: socket.socket, chance: random.Random) -> None:
    _sends_a_part(client, chance)
    client.shutdown(socket.SHUT_WR)


def _resets(client: socket.socket, chance: random.Random) -> None:
    _sends_a_part(client, chance)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


WAYS: tuple[Callable[[socket.socket, random.Random], None], ...] = (
    _sends_anything,
    _sends_nearly_a_request,
    _sends_a_part,
    _asks_and_does_not_read,
    _half_closes,
    _resets,
)


def failures(seed: int, count: int = 2000) -> Iterator[str]:
    """A sentence for each good scrape that was not answered, and for what is left open at the end."""
    chance = random.Random(seed)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    ended, end = os.pipe()
    serving = threading.Thread(
        target=Scrapes(listener, lambda: PAGE, "127.0.0.1").serve, args=(ended,), daemon=True
    )
    serving.start()
    held: list[socket.socket] = []
    for number in range(count):
        client = socket.create_connection(("127.0.0.1", port), MOST_S)
        held.append(client)
        with suppress(OSError):
            chance.choice(WAYS)(client, chance)
        while len(held) > chance.choice((0, 10, 4 * MOST_CLIENTS)):
            held.pop(chance.randrange(len(held))).close()
        if number % EVERY == 0 and (fault := _fault_of_scrape(port)):
            yield f"after client {number} of seed {seed}: {fault}"
    for client in held:
        client.close()
    os.close(end)
    serving.join(MOST_S)
    os.close(ended)
    if serving.is_alive():
        yield f"it did not end (seed {seed})"


def _fault_of_scrape(port: int) -> str | None:
    began_s = time.monotonic()
    try:
        with socket.create_connection(("127.0.0.1", port), MOST_S) as client:
            client.sendall(GOOD)
            received = b""
            while piece := client.recv(1 << 16):
                received += piece
    except OSError as error:
        return f"a scrape ended with {error} after {time.monotonic() - began_s:.1f} s"
    return None if received.endswith(PAGE.encode()) else f"a scrape was answered {received[:60]!r}"
