"""A blind exam: jobs and traces of random shape with random faults, and a score of their diagnoses.

It was written from the documentation alone, by an engineer who had not read how the diagnosis is made. The meaning of a rule is taken
from its page in docs/rules, the cost of a fault from the same program without it, or from the exam's own simulator.
"""
