"""Errors that were counted on the devices of ranks, beside what else is known of how the job stopped."""

from __future__ import annotations

import msgspec

from ddpdoctor.measure.hangfacts import StopFacts

from .evidence import RunEvidence


def of_devices(causes: dict[str, StopFacts], run: RunEvidence) -> dict[str, StopFacts]:
    """``causes``, of which one is the device's where errors were counted on those of all ranks that it names, or it names none."""
    if not causes or not run.devices:
        return causes
    counted = [
        f"NVML counted on the device of rank {rank}: {', '.join(errors)}."
        for rank, errors in sorted(run.devices.items())
    ]
    (name, first), *rest = causes.items()
    named = set(first.ranks or run.devices)
    if rest or not named <= set(run.devices):
        told = msgspec.structs.replace(first, evidence=[*first.evidence, *counted])
        return {**causes, name: told}
    errors = [error for rank in sorted(named) for error in run.devices[rank]]
    message = first.message if name == "device" else ", ".join(dict.fromkeys(errors))
    return {
        "device": msgspec.structs.replace(
            first, ranks=sorted(named), message=message, evidence=[*first.evidence, *counted]
        )
    }
