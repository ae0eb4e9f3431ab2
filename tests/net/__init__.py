"""The net under the analysis: what it says today of many jobs, frozen, and one command that compares.

``python -m tests.net`` diagnoses recorded, public and generated jobs and shows each place where a diagnosis differs from
the frozen one. It tells that something changed, never that it was right: that is for the tests that know the truth.
"""
