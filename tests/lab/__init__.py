"""The lab: real jobs, each with one planted fault, against the diagnosis they must get.

``python -m tests.lab`` prints the confusion matrix, ``python -m tests.lab.whatif`` predicted against measured step times. Each job is
an ordinary training script of ``jobs/`` into which a fault is written as text, so that the script kept beside a failed case is
exactly what ran, and the line that must be named is known.
"""
