"""The road from paths to a diagnosis. The command line and the Python API both take it, and it alone knows all stages.

In come paths and :class:`Options`, out comes a :class:`~ddpdoctor.diagnose.diagnosis.Diagnosis`. What each stage gives is
frozen, and the next one takes nothing else::

    paths ─► load ─► Inputs ─► prepare ─► Prepared (with windows) ─► measured ─► Measured ─► judged ─► Diagnosis, built once

A table of operations (Parquet) comes to Measured by a way of its own. Notes keep their codes until the Diagnosis, which
has their sentences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import ddpdoctor.report
from ddpdoctor.deferred import deferred
from ddpdoctor.stages import Progress

from .inputs import Inputs, load
from .job import command_and_start
from .options import Options
from .road import Prepared, analyze, analyze_or_read, conclude, prepare

if TYPE_CHECKING:
    from .dataframes import Frames, frames


# They need polars, which takes longer to import than a small trace to analyse.
__getattr__ = deferred(__name__, {"dataframes": "Frames frames"})
