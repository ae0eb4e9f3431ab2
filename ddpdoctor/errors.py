"""Errors shown to the user. ``cli`` prints each as a single line on stderr."""

from __future__ import annotations


class DdpDoctorError(Exception):
    """An error that the user can fix. The message names the input, the problem, and what to do."""


class UnusableInput(DdpDoctorError):
    """Nothing in the input can be analysed. ``ddpdoctor analyze`` exits with 2."""


class RuleError(DdpDoctorError):
    """A rule file is invalid. The message names the file, the field and the reason."""
