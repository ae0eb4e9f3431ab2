"""Compressed parts of a page as text."""

from __future__ import annotations

import base64
import gzip
import re

from ddpdoctor.diagnose.diagnosis import Diagnosis
from ddpdoctor.report.html import render_html


def unpacked(packed: str) -> str:
    """The text in base64 of gzip."""
    return gzip.decompress(base64.b64decode(packed)).decode()


def readable_html(diagnosis: Diagnosis) -> str:
    """The report with decompressed figures, without the library, whose base64 contains short words by chance."""
    page = re.sub(r'(id="ddpdoctor-plotly">)[^<]*', r"\1", render_html(diagnosis))
    return re.sub(r'(id="ddpdoctor-figures">)([^<]*)', lambda found: found[1] + unpacked(found[2]), page)
