"""Options of ``ddpdoctor run``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddpdoctor.errors import DdpDoctorError


@dataclass(frozen=True)
class RunOptions:
    """Options of one recorded run; the defaults are those of the command line."""

    out: Path | None = None
    """Run directory; None makes one below ``ddpdoctor-runs/``."""
    profile: bool = True
    profile_steps: tuple[int, int] | None = None
    """(First step of the profiler window, step before which it closes); None: the hook chooses."""
    max_trace_mb: int = 256
    """Largest trace of a rank on disk, in MB of 10^6 bytes."""
    telemetry: bool = True
    telemetry_interval_s: float = 1.0
    prometheus: tuple[str, int] | None = None
    """(host, port) at which this launcher serves metrics while the job runs."""

    hang_after_s: float | None = None
    """Seconds without a step after which a hang is reported; None derives it from the job's history, 0 disables it."""
    on_hang: str = "report"
    """``report``, or ``kill``, which ends the job."""

    def as_document(self) -> dict[str, Any]:
        """The options as the manifest stores them."""
        from ddpdoctor.rundir.privacy import mask_text

        document = asdict(self)
        document["out"] = None if self.out is None else mask_text(str(self.out))
        return document


def asked_options(values: Mapping[str, Any]) -> RunOptions:
    """Recording options from a command line's ``values`` by name. Raises DdpDoctorError for a malformed value."""
    steps, address = values["profile_steps"], values["prometheus"]
    return RunOptions(
        out=values["out"],
        profile=not values["no_profile"],
        profile_steps=None if steps is None else parse_step_range(steps),
        max_trace_mb=values["max_trace_mb"],
        telemetry=not values["no_telemetry"],
        telemetry_interval_s=values["telemetry_interval"],
        prometheus=None if address is None else parse_address(address),
        hang_after_s=values["hang_after"],
        on_hang=values["on_hang"],
    )


def parse_step_range(text: str) -> tuple[int, int]:
    """Parse ``"A:B"``: steps A to B-1. Raises DdpDoctorError for anything else."""
    found = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text)
    if not found or int(found.group(1)) >= int(found.group(2)):
        raise DdpDoctorError(
            f"--profile-steps {text}: give the first step and the one to stop before, as in 20:25."
        )
    return int(found.group(1)), int(found.group(2))


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``"PORT"`` (on 127.0.0.1) or ``"HOST:PORT"``. Raises DdpDoctorError for anything else."""
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isdecimal() or int(port) > 65535 or (colon and not host):
        raise DdpDoctorError(
            f"--prometheus {text}: give a port, as in 9400, or an address, as in 0.0.0.0:9400."
        )
    return host or "127.0.0.1", int(port)
