"""The dashboard's panels, drawn from the metrics that a real Prometheus has collected from a recorded job. It is not Grafana."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddpdoctor.report import words
from ddpdoctor.report.charts.lines import ChartAxes, LineChart, line_chart, line_data
from ddpdoctor.report.html import inlined, page_environment
from tests.ports import free_port

from . import gallery

PROGRAM = shutil.which("prometheus")
DASHBOARD = gallery.DOCS / "grafana" / "ddpdoctor.json"
SCRAPE_S = 1
WARM_UP_S = 75
"""Before the first scrape that is drawn: Python starts, torch is imported, and rates over a minute know one."""
HEIGHT = 110
_VARIABLE = re.compile(r"\{\{(\w+)\}\}")
_SHOW: dict[str, Callable[[float], str]] = {
    "s": lambda value: words.milliseconds(1e3 * value) if value < 1 else words.seconds(value),
    "percentunit": words.percent,
    "bytes": words.size,
    "short": lambda value: f"{value:.3g}",
}
_PAGE = """
{% extends "page.html.j2" %}
{% import "charts.html.j2" as charts %}
{% set kind = "dashboard" %}
{% block title %}dashboard{% endblock %}
{% block headline %}<h1 class="healthy">{{ title }}</h1>{% endblock %}
{% block main %}
<style>.panels { display: grid; grid-template-columns: 1fr 1fr; gap: 0 40px }</style>
<div class="panels">
{% for chart in shown %}<section><h3 id="panel-{{ loop.index }}">{{ chart.title }}</h3>
{{ charts.lines(chart, "panel-" ~ loop.index) }}</section>
{% endfor %}
</div>
{% endblock %}
"""


def record(command: Sequence[str], port: int, environment: dict[str, str], seconds: float) -> list[LineChart]:
    """The panels' charts of ``seconds`` of a job whose ``command`` serves metrics at ``port``, and is then ended."""
    with tempfile.TemporaryDirectory(prefix="ddpdoctor-prometheus-") as folder:
        own = free_port()
        target = {"job_name": "ddpdoctor", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
        settings = {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": [target]}
        (Path(folder) / "prometheus.yml").write_text(json.dumps(settings), encoding="utf-8")
        server = [
            str(PROGRAM),
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{own}",
        ]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        processes = [subprocess.Popen(server, **quiet), subprocess.Popen(command, env=environment, **quiet)]
        try:
            time.sleep(WARM_UP_S + seconds)
            end_s = time.time()
            return _charts(own, end_s - seconds, end_s)
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait()


def page(shown: Sequence[LineChart], title: str) -> str:
    """A page with the charts, in two columns."""
    style, _ = inlined("report.css")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return page_environment().from_string(_PAGE).render(style=style, policy=policy, shown=shown, title=title)


def _charts(port: int, start_s: float, end_s: float) -> list[LineChart]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    found = [_chart(panel, port, start_s, end_s) for panel in panels if panel["type"] == "timeseries"]
    return [chart for chart in found if chart is not None]


def _chart(panel: dict[str, Any], port: int, start_s: float, end_s: float) -> LineChart | None:
    """The chart of a panel; None where nothing was measured, such as GPUs."""
    times = list(range(int(start_s), int(end_s), SCRAPE_S))
    lines = []
    for target in panel["targets"]:
        for series in _answer(port, target["expr"], times):
            name = _VARIABLE.sub(
                lambda found, of=series: of["metric"].get(found[1], ""), target["legendFormat"]
            )
            values = {round(float(at)): float(value) for at, value in series["values"]}
            lines.append((name.replace(socket.gethostname(), "host-1"), [values.get(at) for at in times]))
    unit = panel.get("fieldConfig", {}).get("defaults", {}).get("unit", "short")
    axes = ChartAxes(
        title=panel["title"],
        description=panel["title"],
        x=range(len(times)),
        x_label="second",
        height=HEIGHT,
        show=_SHOW.get(unit, _SHOW["short"]),
        unit=unit,
        group="lines",
        binary=unit == "bytes",
    )
    return line_chart(line_data(axes, sorted(lines)))


def _answer(port: int, expression: str, times: Sequence[int]) -> list[dict[str, Any]]:
    query = {
        "query": expression.replace("$host", ".*"),
        "start": times[0],
        "end": times[-1],
        "step": SCRAPE_S,
    }
    url = f"http://127.0.0.1:{port}/api/v1/query_range?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found
