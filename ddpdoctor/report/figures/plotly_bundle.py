"""Figures as objects of the package plotly, and the chart library with the figures' data for HTML pages.

The library is the published file ``plotly-cartesian.min.js`` of the npm package ``plotly.js-cartesian-dist-min``, unchanged and
compressed. :data:`SHA256` is its hash, with which the Content-Security-Policy allows this script only. It is version 3.1.0 because
later ones insert style elements and offer to upload a figure.
"""

from __future__ import annotations

import base64
import functools
import gzip
import importlib.resources
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.report.figures.spec import Detail, Spec, light_colours, with_colours
from ddpdoctor.report.figures.specs import InteractiveData, figure_specs, interactive_specs
from ddpdoctor.report.json_output import plain_value

if TYPE_CHECKING:
    import plotly.graph_objects as go


LIBRARY = "plotly-cartesian-3.1.0.min.js.gz"
SHA256 = "xGK0ChpULhbDUz+X05+7uRr09SZ/PL8jvXDXhe/ETDg="
BUDGET_BYTES = 80_000
"""Most bytes of a report's packed figures: with the library, the style and the script at most 0.7 MB."""
_DETAILS = (
    Detail(points=1000, rows=64, spans=6000),
    Detail(points=480, rows=64, spans=3000),
    Detail(points=240, rows=64, spans=2000),
    Detail(points=200, rows=48, spans=1000),
    Detail(points=120, rows=32, spans=600),
    Detail(points=60, rows=16, spans=200),
)
"""Levels of detail, from fine to coarse; the first that fits :data:`BUDGET_BYTES` is used."""


class PlotlyBundle(msgspec.Struct, frozen=True):
    """Library and figures as base64 of gzip, for ``script`` elements of type ``text/plain``."""

    library: str
    figures: str
    names: list[str]


def interactive_bundle(data: InteractiveData) -> PlotlyBundle | None:
    """The bundle of the report's interactive charts; None if there are none."""
    packed_figures, names = "", []
    for detail in _DETAILS:
        specs = interactive_specs(data, detail)
        packed_figures, names = _packed(specs), list(specs)
        if len(packed_figures) <= BUDGET_BYTES:
            break
    return PlotlyBundle(_library(), packed_figures, names) if names else None


def bundle_of(specs: Mapping[str, Spec]) -> PlotlyBundle:
    """The bundle of ``specs`` in full detail."""
    return PlotlyBundle(_library(), _packed(specs), list(specs))


@functools.cache
def _library() -> str:
    place = importlib.resources.files("ddpdoctor.report.figures").joinpath("library", LIBRARY)
    return base64.b64encode(place.read_bytes()).decode()


def _packed(specs: Mapping[str, Any]) -> str:
    data = msgspec.json.encode(specs, enc_hook=plain_value)
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def figures(diagnosis: Diagnosis) -> dict[str, go.Figure]:
    """All figures by name. Raises DdpDoctorError if plotly is not installed."""
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise DdpDoctorError(f"Figures need the package plotly ({error}): pip install plotly.") from error
    return {
        name: go.Figure(with_colours(spec, light_colours())) for name, spec in figure_specs(diagnosis).items()
    }
