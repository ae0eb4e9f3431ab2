"""The error if a tracker's package is not installed."""

from __future__ import annotations

from ddpdoctor.errors import DdpDoctorError


def missing_package(extra: str, error: ImportError) -> DdpDoctorError:
    """The error for the option and the extra named ``extra``."""
    return DdpDoctorError(
        f"--{extra} needs its package ({error}): pip install '.[{extra}]' in a checkout of ddpdoctor."
    )
