"""A blind exam: jobs and traces of drawn shape with drawn faults, and a score of what the diagnosis says of them.

Written from the documentation alone, by somebody who had not read how the diagnosis is made: what a rule means is taken
from its page in docs/rules, what a fault costs from the same program without it, or from a simulator of its own.
"""
