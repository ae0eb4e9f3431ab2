"""Keeps errors of the hook away from the job: counts them, reports the first one per process, and switches off a part that keeps
failing."""

from __future__ import annotations

import sys
import traceback

ERRORS_ALLOWED = 3
"""A part with this many errors is switched off: an occasional error does not end its recording, a broken part stops costing time."""
_MESSAGES_KEPT = 10
"""Upper limit of the messages in rank.json; the first ones are kept."""

errors: list[str] = []
"""Messages for rank.json, in this process."""
_reported = False


class Part:
    """A part of the hook that can be switched off separately."""

    __slots__ = ("errors", "name", "off")

    def __init__(self, name: str) -> None:
        self.name = name
        self.off = False
        self.errors = 0

    def failed(self, error: BaseException, record: str = "", message: str = "") -> None:
        """Count an error. The first one of the process is reported to the user. ``record`` goes into rank.json, ``message`` is the
        sentence for the user. By default both name the error."""
        self.errors += 1
        if self.errors >= ERRORS_ALLOWED:
            self.off = True
        frames = traceback.extract_tb(error.__traceback__)
        place = f" at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
        entry = record or f"{self.name}: {error_line(error)}{place}"
        if len(errors) < _MESSAGES_KEPT and entry not in errors:
            errors.append(entry)
        sentence = f"recording of {self.name} has a problem ({error_line(error)}); the job goes on."
        _report(f"ddpdoctor: {message or sentence}\n")


def error_line(error: BaseException) -> str:
    """The error as one line with secrets masked, for rank.json."""
    text = masked_text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def masked_text(error: BaseException) -> str:
    """The error's text with secrets masked; "" if its ``__str__`` raises."""
    try:
        # Imported here because compiling its patterns takes 20 ms.
        from ..rundir.privacy import mask_text

        return mask_text(str(error))
    except Exception:
        return ""


_parts: dict[str, Part] = {}


def part(name: str) -> Part:
    """Return the part with this name; create it if needed."""
    return _parts.setdefault(name, Part(name))


def _report(message: str) -> None:
    global _reported
    if not _reported:
        _reported = True
        sys.stderr.write(message)


def reset() -> None:
    """Reset all counts, in a forked child."""
    global _reported
    _reported = False
    errors.clear()
    for each in _parts.values():
        each.errors, each.off = 0, False
