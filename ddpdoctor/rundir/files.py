"""Writing that survives a crash, and reading of what a crash left behind."""

from __future__ import annotations

import json
import os
from typing import Any, Iterator


def write_json(path: str, document: Any) -> None:
    """Replace ``path`` as a whole, see :func:`write_whole`. Raises OSError or TypeError; ``path`` then is as before."""
    write_whole(path, json.dumps(document, separators=(",", ":"), default=str).encode())


def write_whole(path: str, data: bytes) -> None:
    """Replace ``path`` as a whole: written beside, flushed, renamed. Raises OSError; ``path`` then is as before."""
    beside = f"{path}.{os.getpid()}.tmp"
    try:
        with open(beside, "wb") as out:
            out.write(data)
        os.replace(beside, path)
    except BaseException:
        try:
            os.unlink(beside)
        except OSError:
            pass
        raise


def read_json(path: str, notes: list[str]) -> dict[str, Any] | None:
    """The JSON object in ``path``; None with a sentence added to ``notes`` where it is missing or broken."""
    try:
        with open(path, "rb") as source:
            document = json.loads(source.read())
    except FileNotFoundError:
        notes.append(f"{path} is missing.")
        return None
    except OSError as error:
        notes.append(f"{path} cannot be read: {error.strerror or error}.")
        return None
    except ValueError as error:
        notes.append(f"{path} cannot be read: {error}.")
        return None
    if not isinstance(document, dict):
        notes.append(f"{path} does not hold a JSON object.")
        return None
    return document


def read_json_lines(path: str, notes: list[str]) -> Iterator[dict[str, Any]]:
    """Each line's object. A cut last line is what a kill leaves and is passed over; other broken lines are
    counted in ``notes``."""
    broken = 0
    try:
        source = open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{path} cannot be read: {error}.")
        return
    with source:
        for line in source:
            if not line.endswith(b"\n"):
                break
            try:
                document = json.loads(line)
            except ValueError:
                broken += 1
                continue
            if isinstance(document, dict):
                yield document
            else:
                broken += 1
    if broken:
        notes.append(f"{path}: {broken} broken line{'s' if broken > 1 else ''} left out.")
