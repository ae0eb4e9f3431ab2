"""Errors shown to the user, and suggestions for misspelled names in them. ``cli`` prints each as a single line on stderr."""

from __future__ import annotations

from collections.abc import Iterable


class DdpDoctorError(Exception):
    """An error that the user can fix. The message names the input, the problem, and what to do."""


class UnusableInput(DdpDoctorError):
    """Nothing in the input can be analysed. ``ddpdoctor analyze`` exits with 2."""


class RuleError(DdpDoctorError):
    """A rule file is invalid. The message names the file, the field and the reason."""


_MIN_SIMILARITY = 0.6
"""Minimum ratio of difflib, its default."""
_MAX_NAMES = 3


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " Did you mean ...?" with the names in ``known`` similar to ``name``, to append to an error message; "" if there are none."""
    import difflib  # takes some ms, and is rarely needed

    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, _MAX_NAMES, _MIN_SIMILARITY)
    # Else dotted names with the same last part.
    end = name.rpartition(".")[2]
    near = near or [each for each in names if "." in each and each.rpartition(".")[2] == end][:_MAX_NAMES]
    if not near:
        return ""
    *first, last = near
    return f" Did you mean {', '.join(first)} or {last}?" if first else f" Did you mean {last}?"
