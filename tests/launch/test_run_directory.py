"""Who may write to which run directory."""

import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.launch.directory import JobIdentity, create_exclusively, open_run
from ddpdoctor.rundir import read_json
from ddpdoctor.rundir.liveness import boot_id, pid_namespace

from .launched import DEAD

ALONE = JobIdentity(None, None)


def manifest(**fields):
    return {
        "schema": "ddpdoctor.run/1",
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid_namespace": pid_namespace(),
        "pid": os.getpid(),
        "started_ns": time.time_ns(),
        "ended_ns": None,
        "job_id": None,
        "task": None,
        **fields,
    }


def test_default_run_is_made_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = open_run(None, "stamp-train", ALONE, manifest())
    second = open_run(None, "stamp-train", ALONE, manifest())
    assert first.run == tmp_path / "ddpdoctor-runs" / "stamp-train"
    assert second.run == tmp_path / "ddpdoctor-runs" / "stamp-train-2"
    assert first.owner and second.owner
    assert json.loads((first.run / "manifest.json").read_text())["schema"] == "ddpdoctor.run/1"
    assert not list(tmp_path.rglob("*.tmp"))


def test_default_run_goes_to_the_temporary_folder_where_here_is_no_place(tmp_path, monkeypatch):
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    (here / "ddpdoctor-runs").write_text("a file in the way")
    monkeypatch.chdir(here)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    launch = open_run(None, "stamp-train", ALONE, manifest())
    assert launch.run.is_relative_to(temporary)


def test_a_finished_run_is_refused(tmp_path):
    launch = open_run(tmp_path / "run", "", ALONE, manifest())
    launch.finish(ended_ns=1, exit_code=0)
    with pytest.raises(DdpDoctorError, match="finished run; choose another --out"):
        open_run(tmp_path / "run", "", ALONE, manifest())


def test_a_running_run_is_joined(tmp_path):
    first = open_run(tmp_path / "run", "", ALONE, manifest())
    second = open_run(tmp_path / "run", "", ALONE, manifest(host="other", pid=4))
    assert first.owner and not second.owner
    assert first.others_running() == ["other:4"]
    second.finish(ended_ns=2, exit_code=0)
    assert first.others_running() == []
    first.finish(ended_ns=3, exit_code=0)
    written = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert written["ended_ns"] == 3
    assert written["hosts"] == sorted([socket.gethostname(), "other"])


def test_a_run_whose_launcher_died_is_refused(tmp_path):
    open_run(tmp_path / "run", "", ALONE, manifest(pid=DEAD))
    with pytest.raises(DdpDoctorError, match="cut off"):
        open_run(tmp_path / "run", "", ALONE, manifest())


def test_a_run_whose_launcher_nobody_waited_for_is_refused(tmp_path):
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    open_run(tmp_path / "run", "", ALONE, manifest(pid=child.pid))
    with pytest.raises(DdpDoctorError, match="cut off"):
        open_run(tmp_path / "run", "", ALONE, manifest())
    child.wait()


@pytest.mark.parametrize("elsewhere", [{"pid_namespace": 1}, {"boot": "of another machine of this name"}])
def test_a_run_whose_launcher_cannot_be_seen_from_here_is_joined(tmp_path, elsewhere):
    """As one in another container with the host's name."""
    first = open_run(tmp_path / "run", "", ALONE, manifest(pid=DEAD, **elsewhere))
    second = open_run(tmp_path / "run", "", ALONE, manifest())
    assert first.owner and not second.owner
    assert second.others_running() == [f"{socket.gethostname()}:{DEAD}"]


def test_a_late_launcher_of_the_same_job_joins_a_finished_run(tmp_path):
    tasks = [JobIdentity("slurm-1.0", task) for task in range(3)]
    documents = [manifest(job_id="slurm-1.0", task=task) for task in range(3)]
    first = open_run(tmp_path / "run", "", tasks[0], documents[0])
    first.finish(ended_ns=1, exit_code=0)
    late = open_run(tmp_path / "run", "", tasks[1], documents[1])
    assert not late.owner
    with pytest.raises(DdpDoctorError, match="finished"):
        open_run(tmp_path / "run", "", tasks[0], documents[0])


@pytest.mark.parametrize("name", ["results.csv", "ranks"])
def test_a_folder_with_something_else_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(DdpDoctorError, match=f"it holds {name}"):
        open_run(tmp_path, "", ALONE, manifest())
    assert os.listdir(tmp_path) == [name]


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DdpDoctorError, match="is a file"):
        open_run(tmp_path / "file", "", ALONE, manifest())


def test_only_one_creates_also_without_hard_links(tmp_path, monkeypatch):
    def no_links(*_):
        raise PermissionError("no hard links here")

    monkeypatch.setattr("os.link", no_links)
    assert create_exclusively(tmp_path / "a.json", {"n": 1})
    assert not create_exclusively(tmp_path / "a.json", {"n": 2})
    assert json.loads((tmp_path / "a.json").read_text()) == {"n": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_withdraw_leaves_nothing(tmp_path):
    open_run(tmp_path / "run", "", ALONE, manifest()).withdraw()
    assert os.listdir(tmp_path) == []


def launches(run, count, monkeypatch):
    """Open ``run`` by so many launchers of one job; the launches, and the paths of all documents that are read from then on."""
    made = []
    for task in range(count):
        made.append(
            open_run(run, "name", JobIdentity("job", str(task)), manifest(job_id="job", task=str(task)))
        )
    seen = []

    def read(path, notes):
        seen.append(Path(path).name)
        return read_json(path, notes)

    monkeypatch.setattr("ddpdoctor.launch.directory.read_json", read)
    return made, seen


def test_a_launcher_that_joins_does_not_read_the_records_of_all_others(tmp_path, monkeypatch):
    _, seen = launches(tmp_path / "run", 20, monkeypatch)
    open_run(tmp_path / "run", "name", JobIdentity("job", "new"), manifest(job_id="job", task="new"))
    assert [name for name in seen if name.startswith("launch-")] == []


def test_the_record_of_a_launcher_that_has_ended_is_read_once(tmp_path, monkeypatch):
    made, seen = launches(tmp_path / "run", 20, monkeypatch)
    for launch in made[1:-1]:
        launch.finish(ended_ns=time.time_ns())
    first = made[0].others_running()
    assert len(first) == 1 and len(seen) == 19
    seen.clear()
    assert made[0].others_running() == first and len(seen) == 1
    made[-1].finish(ended_ns=time.time_ns())
    assert made[0].others_running() == []


@pytest.mark.parametrize(
    ("content", "others"),
    [
        ('{"name": "my app", "icons": []}', []),
        ('{"name": "my app", "icons": []}', ["hosts/mine"]),
        ("[]", ["index.html"]),
        ("no JSON", ["index.html"]),
    ],
)
def test_a_manifest_of_something_else_is_refused(tmp_path, content, others):
    app = tmp_path / "app"
    for name in ("manifest.json", *others):
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text(content)
    with pytest.raises(DdpDoctorError, match=r"it holds manifest\.json\) and is no run of ddpdoctor"):
        open_run(app, "", ALONE, manifest())
    files = {str(file.relative_to(app)) for file in app.rglob("*") if file.is_file()}
    assert files == {"manifest.json", *others}
