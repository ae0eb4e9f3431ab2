"""Regression net of the analysis: frozen diagnoses of many jobs, and a command that compares them with the current ones.

``python -m tests.net`` diagnoses recorded, public and generated jobs and shows each difference from the frozen diagnoses. It shows
that something changed, not whether it is right; that is checked by the tests with known ground truth.
"""
