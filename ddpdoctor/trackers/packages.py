"""What is said where a tracker's package is missing."""

from __future__ import annotations

from ddpdoctor.errors import DdpDoctorError


def missing_package(extra: str, error: ImportError) -> DdpDoctorError:
    """The error for the option and extra called ``extra``."""
    return DdpDoctorError(f"--{extra} needs its package ({error}): pip install 'ddpdoctor[{extra}]'.")
