"""The metrics of a run: their text, the server, Prometheus's own tools, and the dashboard that draws them."""

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from ddpdoctor.telemetry.live import LiveRun
from ddpdoctor.telemetry.prometheus import GPU_METRICS, METRICS, Exporter, exposition, serve_metrics

ROOT = Path(__file__).parents[2]
RUN = ROOT / "fixtures" / "slow-data-one-rank"
DASHBOARD = ROOT / "docs" / "grafana" / "ddpdoctor.json"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")


@pytest.fixture
def run():
    live = LiveRun(RUN)
    live.update()
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


@contextmanager
def serving(run, host):
    """An exporter that answers in a thread of this process."""
    exporter = Exporter(run, host, ("127.0.0.1", 0))
    ended, end = os.pipe()
    thread = threading.Thread(target=exporter.serve, args=(ended,))
    thread.start()
    try:
        yield exporter
    finally:
        os.close(end)
        thread.join(10)
        os.close(ended)
        assert not thread.is_alive()


@pytest.fixture
def exporter():
    with serving(RUN, "host1") as served:
        yield served


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def test_every_metric_is_there_with_base_units(run):
    text = exposition(run, "host1")
    assert set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)) == set(METRICS)
    assert 'ddpdoctor_steps_total{host="host1",rank="1"} 100.0' in text
    assert 'ddpdoctor_gpu_utilization_ratio{host="host1",gpu="0"} 0.97' in text
    parts = re.findall(r'^ddpdoctor_run_seconds\{host="host1",part="(\w+)"\} ', text, re.MULTILINE)
    assert parts[0] == "start" and "steps" in parts
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


def test_samples_are_those_of_the_hosts_own_ranks_so_that_hosts_add_up(run):
    def samples(host):
        found = re.search(r"^ddpdoctor_samples_per_second{.*} (.+)$", exposition(run, host), re.MULTILINE)
        return None if found is None else float(found[1])

    whole = samples("host1")
    run.ranks[1].host = "host2"
    assert samples("host1") + samples("host2") == pytest.approx(whole) and samples("host3") is None


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


def test_a_port_in_use_is_one_sentence_and_no_error(exporter, tmp_path):
    said = []
    serve_metrics(tmp_path, "host1", ("127.0.0.1", exporter.port), 0, said.append)
    assert len(said) == 1 and f"127.0.0.1:{exporter.port} cannot be served on" in said[0]


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
@pytest.mark.extended
def test_a_real_prometheus_scrapes_it_and_answers_every_query_of_the_dashboard(exporter, tmp_path):
    with prometheus(tmp_path, exporter.port) as port:
        api = f"http://127.0.0.1:{port}/api/v1/query?query="
        assert wait_for(lambda: result(api, "ddpdoctor_steps_total")) == {"0": 100.0, "1": 100.0}
        for expression in expressions():
            result(api, expression.replace("$host", ".*"))


@contextmanager
def prometheus(tmp_path, target, rules=()):
    """A real one that scrapes a port five times a second; its own port."""
    settings = {
        "global": {"scrape_interval": "200ms", "evaluation_interval": "200ms"},
        "rule_files": [str(tmp_path / name) for name in rules],
        "scrape_configs": [
            {"job_name": "ddpdoctor", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}
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
        yield port
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


ALERTS = ROOT / "docs" / "grafana" / "alerts.yml"
STEP_NS = 27_000_000
"""So short that a job records few of them in full: one block of eight in 64."""
LATE_NS = 9_000_000
BLOCK, EVERY = 8, 64


class ShortSteps:
    """A job of two ranks, of which rank 1 is late in every step, recorded as its hook does."""

    def __init__(self, run):
        self.logs, self.steps, self.start_ns = [], 0, time.time_ns()
        for rank in range(2):
            folder = run / "ranks" / f"{rank:05d}"
            folder.mkdir(parents=True)
            (folder / "rank.json").write_text(json.dumps({"rank": rank, "host": "a", "pid": 1}))
            self.logs.append(folder / "steps.jsonl")

    def go_on(self, until_s):
        """Record the steps of the job's first ``until_s``."""
        upto = int(until_s * 1e9) // STEP_NS
        for rank, log in enumerate(self.logs):
            with log.open("a") as out:
                out.writelines(self.line(number, rank) for number in range(self.steps, upto))
        self.steps = upto

    def line(self, number, rank):
        start = self.start_ns + number * STEP_NS
        line = {"step": number, "t": [start, start + STEP_NS]}
        if number // BLOCK % EVERY:
            return json.dumps({**line, "thin": True}) + "\n"
        events = [
            {"k": "data", "s": 0, "d": 2_000_000, "n": 16},
            {"k": "bwd", "s": 8_000_000, "d": 17_000_000, "sync": True, "base": 8_000_000},
        ]
        events[1]["ready"] = [3_000_000, 6_000_000 + rank * LATE_NS]
        return json.dumps({**line, "ev": events}) + "\n"


def scraped(tmp_path, monkeypatch, *, every_s, scrapes, stands_from=None):
    """By series: what each scrape of such a job had; None where it had nothing."""
    job, live = ShortSteps(tmp_path), LiveRun(tmp_path)
    found = {}
    for scrape in range(scrapes):
        now_s = (scrape + 1) * every_s
        job.go_on(now_s if stands_from is None else min(now_s, stands_from))
        monkeypatch.setattr(time, "time", lambda now_s=now_s: job.start_ns / 1e9 + now_s)
        live.update()
        for line in exposition(live, "a").splitlines():
            if not line.startswith("#"):
                series, value = line.rsplit(" ", 1)
                found.setdefault(series, [None] * scrapes)[scrape] = value
    return found


def test_no_scrape_of_a_job_with_short_steps_lacks_what_was_recorded(tmp_path, monkeypatch):
    found = scraped(tmp_path, monkeypatch, every_s=5, scrapes=30)
    assert found and all(None not in values for values in found.values())
    late = [float(value) for value in found['ddpdoctor_late_seconds{host="a",rank="1"}']]
    assert late == pytest.approx([LATE_NS / 1e9] * 30, rel=1e-3)
    ages = [float(value) for value in found['ddpdoctor_late_age_seconds{host="a",rank="1"}']]
    assert max(ages) < 2 * BLOCK * EVERY * STEP_NS / 1e9 and max(ages) > 5


@pytest.mark.skipif(PROMTOOL is None, reason="no promtool on this machine")
@pytest.mark.parametrize("stands_from", [pytest.param(None, marks=pytest.mark.extended), 300.0])
def test_the_documented_alert_fires_on_what_is_exported(tmp_path, monkeypatch, stands_from):
    """Prometheus's own evaluation of the rule file: a series that a scrape lacks is stale. A job that hangs after five minutes
    is told as one that hangs, and no longer as one with a late rank."""
    run = tmp_path / "run"
    found = scraped(run, monkeypatch, every_s=15, scrapes=120, stands_from=stands_from)
    series = [
        {"series": name, "values": " ".join("stale" if value is None else value for value in values)}
        for name, values in found.items()
    ]
    expected = {
        "RankLate": [{"exp_labels": {"host": "a", "rank": "1", "alertname": "RankLate"}}],
        "JobHangs": [],
    }
    if stands_from is not None:
        expected = {"RankLate": [], "JobHangs": [{"exp_labels": {"host": "a", "alertname": "JobHangs"}}]}
    alerts = ALERTS.read_text()
    (tmp_path / "alerts.yml").write_text(re.sub(r"\n +annotations:\n +summary: .*", "", alerts))
    tests = {
        "rule_files": ["alerts.yml"],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": series,
                "alert_rule_test": [
                    {"eval_time": "25m", "alertname": name, "exp_alerts": alerts}
                    for name, alerts in expected.items()
                ],
            }
        ],
    }
    (tmp_path / "tests.yml").write_text(json.dumps(tests))
    done = subprocess.run(
        [PROMTOOL, "test", "rules", "tests.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_alert_in_the_guide_is_the_one_in_the_file():
    guide = (ROOT / "docs" / "monitoring.md").read_text()
    expression = re.search(r"- alert: RankLate\n +expr: (.+)\n", guide)[1]
    assert f"expr: {expression}\n" in ALERTS.read_text()


@pytest.mark.extended
@pytest.mark.skipif(PROMETHEUS is None, reason="no Prometheus on this machine")
def test_the_alert_fires_in_a_real_prometheus(tmp_path):
    """As it stands in the file, but for how long it must hold."""
    run = tmp_path / "run"
    job = ShortSteps(run)
    job.start_ns -= 60 * 10**9
    job.go_on(60.0)
    (tmp_path / "alerts.yml").write_text(ALERTS.read_text().replace("for: 10m", "for: 1s"))
    with serving(run, "a") as served, prometheus(tmp_path, served.port, ["alerts.yml"]) as port:
        ask = f"http://127.0.0.1:{port}/api/v1/query?query="
        firing = 'ALERTS{alertname="RankLate",alertstate="firing"}'
        assert wait_for(lambda: result(ask, firing)) == {"1": 1.0}
