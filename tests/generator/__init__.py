"""Generates multi-rank profiler traces of DDP jobs with known ground truth.

A small discrete-event simulation of hosts, accelerators and a network writes Kineto JSON, one file per rank, and returns the ground
truth: arrivals, waits, clocks, breakdowns, and the step time without each planted cause. It shares no code with the package under test.
"""

from .model import SMALL, Config, HostClock, Plant, When, cpu_job
from .truth import CollectiveTruth, PlantTruth, StepTruth, Truth, generate

__all__ = [
    "SMALL",
    "CollectiveTruth",
    "Config",
    "HostClock",
    "Plant",
    "PlantTruth",
    "StepTruth",
    "Truth",
    "When",
    "cpu_job",
    "generate",
]
