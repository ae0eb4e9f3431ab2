"""Bundles for recording without installing ddpdoctor: one file, or a folder, that the job's own Python runs.

``build`` writes a bundle of the code that records a job: ``hook``, ``rundir``, ``launch`` and the sampling part of ``telemetry``.
``recording`` is the bundle's command. All code in a bundle runs on Python 3.9 with the standard library only, like the hook.
"""
