"""Figures as objects of the package plotly, which is asked for here and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.report.figures.every import figure_specs
from ddpdoctor.report.figures.spec import light_colours, painted

if TYPE_CHECKING:
    import plotly.graph_objects as go


def figures(diagnosis: Diagnosis) -> dict[str, go.Figure]:
    """Each figure by its name. Raises DdpDoctorError where plotly is not installed."""
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise DdpDoctorError(
            f"Figures need the package plotly ({error}): pip install 'ddpdoctor[plot]'."
        ) from error
    return {name: go.Figure(painted(spec, light_colours())) for name, spec in figure_specs(diagnosis).items()}
