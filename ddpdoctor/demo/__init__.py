"""A two-rank training job with a planted fault, for ``ddpdoctor demo``. :mod:`faults` lists the faults, ``job.py`` is the script."""

from pathlib import Path

from ddpdoctor.demo.faults import FAULTS, Fault, find_fault

JOB = Path(__file__).with_name("job.py")
"""The training script; it does not use ddpdoctor."""
