"""Colours: text is readable, and the parts of a step stay apart for colour-blind readers, in both schemes."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import pytest

from ddpdoctor.measure.taxonomy import PARTS, Part
from ddpdoctor.report import terminal, words

CSS = files("ddpdoctor.report").joinpath("templates/report.css").read_text()
SCHEMES = {
    "light": dict(
        re.findall(r"--([\w]+):(#[0-9a-f]{6})", CSS[: CSS.index("@media (prefers-color-scheme:dark)")])
    ),
    "dark": dict(
        re.findall(
            r"--([\w]+):(#[0-9a-f]{6})",
            CSS[CSS.index("@media (prefers-color-scheme:dark)") : CSS.index("*{box-sizing")],
        )
    ),
}
# Machado, Oliveira, Fernandes 2009, severity 1.0, on linear RGB.
BLINDNESS = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deutan": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
}
CONTRAST_LEAST = 4.5
"""WCAG 2.1 AA for text."""
DISTANCE_LEAST = 11
"""CIELAB units; the eye tells large areas apart from about 2.3."""


def linear(colour):
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def luminance(colour):
    return sum(
        weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True)
    )


def contrast(one, other):
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def lab(colour, matrix):
    rgb = linear(colour)
    seen = [min(1, max(0, sum(m * c for m, c in zip(row, rgb, strict=True)))) for row in matrix]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(m * c for m, c in zip(row, seen, strict=True)) for row in to_xyz]
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (v / white for v, white in zip(xyz, (0.9505, 1.0, 1.089), strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_is_readable(scheme):
    colours = SCHEMES[scheme]
    for name in ("ink", "soft", "link", "critical", "warning", "info", "healthy"):
        assert contrast(colours[name], colours["paper"]) >= CONTRAST_LEAST, name
    for name in ("ink", "soft"):
        assert contrast(colours[name], colours["wash"]) >= CONTRAST_LEAST, name


@pytest.mark.parametrize("part", PARTS)
def test_every_part_has_words_and_colours(part):
    assert part in words.PART_LABELS and part in terminal.PART_MARKS
    assert all(part in colours for colours in SCHEMES.values())
    assert len({letter for letter, _ in terminal.PART_MARKS.values()}) == len(PARTS)


STEP = [part for part in PARTS if part != Part.COMM_WAIT]
"""Waiting is hatched, so its shape tells it apart whatever its colour."""
RUN = ["start", "preparation", "first_batch", "steps", "pauses", "end"]
"""The parts of most runs."""


@pytest.mark.parametrize("part", words.RUN_LABELS)
def test_every_part_of_the_run_has_colours(part):
    assert all(part in colours for colours in SCHEMES.values())
    assert f".p-{part}{{fill:var(--{part})}}" in CSS


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("blindness", BLINDNESS)
@pytest.mark.parametrize("parts", [STEP, RUN])
def test_parts_stay_apart(scheme, blindness, parts):
    colours = {part: lab(SCHEMES[scheme][part], BLINDNESS[blindness]) for part in parts}
    for one, other in itertools.combinations(colours, 2):
        distance = sum((a - b) ** 2 for a, b in zip(colours[one], colours[other], strict=True)) ** 0.5
        assert distance >= DISTANCE_LEAST, (one, other, round(distance, 1))
