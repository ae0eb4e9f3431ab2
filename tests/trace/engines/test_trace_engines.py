"""Wherever the per-rank stage runs, its results are the same."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from ddpdoctor.cli.analyze import command
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.trace import load_traces
from ddpdoctor.trace.clusters import KINDS, open_engine
from ddpdoctor.trace.processes import read_one
from tests.generator import generate
from tests.generator.cases import case
from tests.trace.trace_files import assert_same, document, events, job, write

ROOT = Path(__file__).resolve().parents[3]


# Ray gives its processes half a minute to start, all of them.
@pytest.fixture(
    params=[
        pytest.param(kind, marks=pytest.mark.alone if kind == "ray" else pytest.mark.extended)
        for kind in KINDS
    ]
)
def engine(request, monkeypatch):
    """A cluster of two workers on this machine."""
    pytest.importorskip({"dask": "dask.distributed"}.get(request.param, request.param))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("RAY_ADDRESS", "DASK_SCHEDULER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return request.param


def test_a_cluster_gives_what_processes_give(tmp_path, monkeypatch, engine):
    job(tmp_path, range(5), world_size=5)
    write(tmp_path / "node1_4711.16941282015450.pt.trace.json", "{}")
    monkeypatch.chdir(tmp_path)  # a cluster's workers have a working directory of their own
    files = sorted(os.listdir())
    here, calls = load_traces(files, jobs=1), []
    there = load_traces(files, jobs=2, engine=engine, progress=calls.append)
    for one, other in zip(here.traces, there.traces, strict=True):
        assert_same(one, other)
    assert there.failed == here.failed and there.notes == here.notes
    assert len(calls) == 6 and calls == sorted(calls) and calls[-1] == pytest.approx(1)


def test_the_diagnosis_is_the_same(tmp_path, engine):
    found = []
    generate(case("A").config, tmp_path / "traces")
    for options in ([], ["--engine", engine]):
        arguments = [str(tmp_path / "traces"), "--jobs", "2", "--no-cache", *options]
        file = tmp_path / f"{len(options)}.json"
        done = CliRunner().invoke(command, [*arguments, "--json", str(file)], catch_exceptions=False)
        assert done.exit_code == 0
        found.append(json.loads(file.read_text()) | {"created_ns": 0})
    assert found[0] == found[1]


def test_a_worker_that_dies_costs_its_file_alone(tmp_path, monkeypatch, engine):
    files = job(tmp_path, range(3), world_size=3)

    def die_of_one(file, rank, cache):
        if file == files[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        return read_one(file, rank, cache)

    monkeypatch.setattr("ddpdoctor.trace.clusters.read_one", die_of_one)
    loaded = load_traces(files, jobs=1, engine=engine)
    assert [t.meta.rank for t in loaded.traces] == [0, 2]
    assert [file for file, _ in loaded.failed] == [files[1]]
    assert loaded.failed[0][1].startswith(f"{files[1]}: the worker that read it failed (")


def test_a_cluster_of_our_own_listens_on_the_loopback_alone_and_is_told(tmp_path, caplog, engine):
    listening = set()

    def look(*_):
        own = psutil.Process()
        for process in (own, *own.children(recursive=True)):
            places = process.net_connections(kind="inet")
            listening.update(place.laddr.ip for place in places if place.status == psutil.CONN_LISTEN)

    before = {
        place.laddr.ip for place in psutil.Process().net_connections(kind="inet") if place.status == "LISTEN"
    }
    load_traces(job(tmp_path, range(2), world_size=2), jobs=1, engine=engine, progress=look)
    assert listening - before <= {"127.0.0.1", "::ffff:127.0.0.1"} and listening
    (told,) = [record.getMessage() for record in caplog.records if record.name.startswith("ddpdoctor")]
    assert "cluster was started on this machine at 127.0.0.1" in told and "\n" not in told


@pytest.mark.extended
def test_a_running_dask_cluster_is_joined(tmp_path, monkeypatch):
    distributed = pytest.importorskip("dask.distributed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    files = job(tmp_path, range(2))
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        address = cluster.scheduler_address.replace("tcp", "dask")
        assert [t.meta.rank for t in load_traces(files, engine=address).traces] == [0, 1]
        with distributed.Client(cluster) as client:
            assert len(client.nthreads()) == 1, "the user's cluster goes on"


def test_a_cluster_that_is_not_there_is_one_sentence(tmp_path, engine):
    with pytest.raises(DdpDoctorError, match=r"There is no (Dask scheduler|Ray cluster) at") as raised:
        load_traces(job(tmp_path, [0]), engine=f"{engine}://127.0.0.1:9")
    assert "\n" not in str(raised.value)


def test_a_ray_cluster_that_does_not_start_is_one_sentence(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def init(address, **options):
        raise ConnectionError if address == "auto" else Exception("The current node timed out.\nMore.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(
        DdpDoctorError, match=r"no Ray cluster at this machine: The current node timed out\.$"
    ):
        load_traces(job(tmp_path, [0]), engine="ray")


@pytest.mark.parametrize("spec", ["spark", "dask://", "", "ray:/x"])
def test_an_unknown_engine_is_one_sentence(spec):
    with pytest.raises(DdpDoctorError, match=r"is not an engine: expected dask or dask://HOST:PORT, ray"):
        open_engine(spec)


def test_the_options_of_analyze_reach_the_loader(tmp_path):
    files = [
        *job(tmp_path, range(2), world_size=2),
        write(tmp_path / "x.json", document(events(9), world_size=3)),
    ]
    for options, says in (
        (["--engine", "spark"], "is not an engine"),
        ([], r"(2) 3 rank(s) over nccl"),
        (["--job", "9"], "There is no job 9"),
    ):
        with pytest.raises(DdpDoctorError) as raised:
            CliRunner().invoke(command, [str(tmp_path), *options], catch_exceptions=False)
        assert says in str(raised.value)
    done = CliRunner().invoke(command, [str(tmp_path), "--job", "2", "--no-cache"], catch_exceptions=False)
    assert done.exit_code == 0, files


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_package_is_one_sentence(monkeypatch, kind):
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(DdpDoctorError, match=rf"pip install '\.\[{kind}\]'"):
        open_engine(kind)
