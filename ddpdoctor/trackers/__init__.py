"""Exports a diagnosis to experiment trackers: TensorBoard, MLflow, Weights & Biases.

``contents`` selects the exported data of a :class:`~ddpdoctor.diagnose.diagnosis.Diagnosis` and limits its size
(:class:`TrackerRun`). One module per tracker writes it with the tracker's own package, which is imported only if used.
"""

from __future__ import annotations

from ddpdoctor.errors import DdpDoctorError


def missing_package(extra: str, error: ImportError) -> DdpDoctorError:
    """The error if the package of the tracker ``extra``, which is both an option and an extra, cannot be imported."""
    return DdpDoctorError(
        f"--{extra} needs its package ({error}): pip install '.[{extra}]' in a checkout of ddpdoctor."
    )
