"""Errors of the hook never reach the job: they are counted, reported once per process, and a part that keeps failing
is switched off."""

from __future__ import annotations

import sys
import traceback

ERRORS_ALLOWED = 3
"""A part that failed this often stays off: an occasional error does not end its recording, and a broken part costs
no more."""
_MESSAGES_KEPT = 10
"""Messages in rank.json, the first ones."""

errors: list[str] = []
"""What went wrong in this process, for rank.json."""
_reported = False


class Part:
    """A part of the hook that can fail, and be switched off, alone."""

    __slots__ = ("errors", "name", "off")

    def __init__(self, name: str) -> None:
        self.name = name
        self.off = False
        self.errors = 0

    def failed(self, error: BaseException, record: str = "", message: str = "") -> None:
        """Count an error, and report it to the user once per process.

        ``record`` goes into rank.json, ``message`` is the sentence for the user; the default of both names the error.
        """
        self.errors += 1
        if self.errors >= ERRORS_ALLOWED:
            self.off = True
        frames = traceback.extract_tb(error.__traceback__)
        place = f" at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
        kept = record or f"{self.name}: {error_line(error)}{place}"
        if len(errors) < _MESSAGES_KEPT and kept not in errors:
            errors.append(kept)
        what = f"recording of {self.name} has a problem ({error_line(error)}); the job goes on."
        _report(f"ddpdoctor: {message or what}\n")


def error_line(error: BaseException) -> str:
    """The error in one line, with secrets masked, for rank.json."""
    text = masked_text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def masked_text(error: BaseException) -> str:
    """The error's text with secrets masked; "" if its ``__str__`` raises."""
    try:
        # Its patterns take 20 ms, which a process without errors is spared.
        from ..rundir.privacy import mask_text

        return mask_text(str(error))
    except Exception:
        return ""


_parts: dict[str, Part] = {}


def part(name: str) -> Part:
    """The part of this name."""
    return _parts.setdefault(name, Part(name))


def _report(message: str) -> None:
    global _reported
    if not _reported:
        _reported = True
        sys.stderr.write(message)


def reset() -> None:
    """Forget what happened, in a forked child."""
    global _reported
    _reported = False
    errors.clear()
    for each in _parts.values():
        each.errors, each.off = 0, False
