"""The one hierarchy of errors that a user may see; ``cli`` prints each as a single line on stderr."""

from __future__ import annotations


class DdpDoctorError(Exception):
    """Something the user can act on: the message says what is wrong with which input, and what to do next."""


class UnusableInput(DdpDoctorError):
    """Nothing in the input can be analysed. ``ddpdoctor analyze`` exits with 2."""


class RuleError(DdpDoctorError):
    """A rule file is wrong: the message names the file, the field and the reason."""
