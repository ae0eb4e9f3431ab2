"""Recording where ddpdoctor is not installed: one file, or a folder, that the job's own Python runs.

``making`` puts into it what records a job: ``hook``, ``rundir``, ``launch``, and of ``telemetry`` what samples. ``recording`` is its
command there, ``commandline`` reads its options, ``standins`` has what a bare environment lacks. All of that but ``making`` is
Python 3.9 and standard library, as the hook is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.deferred import deferred

if TYPE_CHECKING:
    from .making import Bundle, write_bundle


__getattr__ = deferred(__name__, {"making": "Bundle write_bundle"})
