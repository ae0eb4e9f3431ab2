"""The metrics of a run: their text, the server, Prometheus's own tools, and the dashboard that draws them."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from ddpdoctor.telemetry import METRICS, LiveRun, start_exporter
from ddpdoctor.telemetry.prometheus import GPU_METRICS, exposition

ROOT = Path(__file__).parents[2]
RUN = ROOT / "fixtures" / "slow-data-one-rank"
DASHBOARD = ROOT / "docs" / "grafana" / "ddpdoctor.json"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")


@pytest.fixture
def run():
    live = LiveRun(RUN)
    live.look()
    for rank in live.ranks.values():
        rank.ended = False
    live.samples["host1"]["ranks"] = {"1": {"cpu_percent": 140.0, "rss_bytes": 5e8}}
    live.samples["host1"]["gpus"] = [
        {
            "index": 0,
            "gpu_utilization_percent": 97,
            "memory_used_bytes": 1 << 34,
            "power_watts": 310.5,
            "temperature_celsius": 61,
        }
    ]
    return live


@pytest.fixture
def exporter():
    warnings = []
    served = start_exporter(RUN, "host1", ("127.0.0.1", 0), warnings.append)
    assert served is not None and not warnings
    yield served
    served.close()


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def test_every_metric_is_there_with_base_units(run):
    text = exposition(run, "host1")
    assert set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)) == set(METRICS)
    assert 'ddpdoctor_steps_total{host="host1",rank="1"} 100.0' in text
    assert 'ddpdoctor_gpu_utilization_ratio{host="host1",gpu="0"} 0.97' in text
    late = float(re.search(r'^ddpdoctor_late_seconds\{host="host1",rank="1"\} (.+)$', text, re.MULTILINE)[1])
    assert 0.02 < late < 0.06


def test_the_time_since_the_last_step_ends_with_the_rank(run):
    run.ranks[0].ended = True
    found = re.findall(
        r'^ddpdoctor_since_last_step_seconds\{host="host1",rank="(\d)"\}',
        exposition(run, "host1"),
        re.MULTILINE,
    )
    assert found == ["1"]


def test_what_was_not_measured_has_no_line(run):
    run.samples.clear()
    text = exposition(run, "host1")
    assert "ddpdoctor_steps_total{" in text
    assert not any(name in text for name in GPU_METRICS)


def test_a_launcher_tells_only_of_its_own_host(run):
    assert "rank=" not in exposition(run, "host2")


def test_labels_are_escaped(run):
    for live in run.ranks.values():
        live.host = 'a"b\\c\nd'
    assert 'host="a\\"b\\\\c\\nd"' in exposition(run, 'a"b\\c\nd')


def test_it_is_served_on_the_loopback_alone(exporter):
    assert "ddpdoctor_steps_total" in get(f"http://127.0.0.1:{exporter.port}/metrics")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"http://127.0.0.1:{exporter.port}/etc/passwd")
    with socket.socket() as other, pytest.raises(OSError):
        other.connect(("127.0.0.2", exporter.port))


def test_a_port_in_use_is_one_sentence_and_no_error(exporter):
    warnings = []
    assert start_exporter(RUN, "host1", ("127.0.0.1", exporter.port), warnings.append) is None
    assert len(warnings) == 1 and f"127.0.0.1:{exporter.port} cannot be served on" in warnings[0]


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool on this machine")
def test_promtool_has_nothing_to_say(run):
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"],
        input=exposition(run, "host1"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(PROMETHEUS is None, reason="no Prometheus on this machine")
def test_a_real_prometheus_scrapes_it_and_answers_every_query_of_the_dashboard(exporter, tmp_path):
    settings = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [
            {"job_name": "ddpdoctor", "static_configs": [{"targets": [f"127.0.0.1:{exporter.port}"]}]}
        ],
    }
    config = tmp_path / "prometheus.yml"
    config.write_text(json.dumps(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        PROMETHEUS,
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        api = f"http://127.0.0.1:{port}/api/v1/query?query="
        assert wait_for(lambda: result(api, "ddpdoctor_steps_total")) == {"0": 100.0, "1": 100.0}
        for expression in expressions():
            result(api, expression.replace("$host", ".*"))
    finally:
        server.terminate()
        server.wait(30)


def wait_for(answer, seconds=30):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if found := answer():
                return found
        except OSError:
            pass
        time.sleep(0.2)
    pytest.fail("Prometheus gave no answer")


def result(api, expression):
    document = json.loads(get(api + urllib.request.quote(expression)))
    assert document["status"] == "success", document
    return {row["metric"].get("rank"): float(row["value"][1]) for row in document["data"]["result"]}


def expressions():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_dashboard_asks_for_what_is_exported_and_leaves_nothing_out():
    document = DASHBOARD.read_text()
    assert set(re.findall(r"\bddpdoctor_\w+", document)) == set(METRICS)
    panels = json.loads(document)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] and panel["fieldConfig"]["defaults"]["unit"] for panel in panels)
