"""The analysis pipeline from paths to a diagnosis, used by the command line and the Python API.

Takes paths and :class:`Options`, returns a :class:`~ddpdoctor.diagnose.diagnosis.Diagnosis`. The result of each stage is
immutable and the only input of the next::

    paths ─► load ─► Inputs ─► prepare ─► PreparedJob (with windows) ─► measure ─► MeasuredJob ─► diagnose ─► Diagnosis

``inputs`` has load, ``driver`` the stages after it, ``job`` the properties of the job itself. A table of operations (Parquet) is measured
separately into a MeasuredJob. Notes keep their codes up to the Diagnosis, which has only their text.
"""

from .driver import PreparedJob, analyze, analyze_or_read, conclude, prepare
from .inputs import Inputs, Options, load
from .job import command_and_start
