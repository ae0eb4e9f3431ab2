"""Where the user's lines lie in their repository: what code hosts need to annotate them."""

import msgspec
import pytest

from ddpdoctor.analysis.source_text import with_repository
from ddpdoctor.diagnose.diagnosis import Coverage, Diagnosis, Finding, Job, Steps, Verdict
from ddpdoctor.measure.places import Where
from ddpdoctor.report.sarif import to_sarif


def diagnosis_of(*files):
    finding = Finding(
        rule="sync/barrier",
        severity="info",
        title="A barrier",
        coverage=Coverage(1, 1),
        where=[Where(str(file), 3, "main") for file in files],
    )
    return Diagnosis(
        healthy=True, verdict=Verdict(None, "fine"), job=Job(), steps=Steps(), findings=[finding]
    )


@pytest.mark.parametrize("mark", ["folder", "file"])
def test_a_job_that_was_started_in_a_subfolder(tmp_path, mark):
    """``.git`` is a file in a second work tree, or in a submodule."""
    if mark == "folder":
        (tmp_path / ".git").mkdir()
    else:
        (tmp_path / ".git").write_text("gitdir: elsewhere")
    lines = [tmp_path / "training" / "jobs" / "train.py", tmp_path / "training" / "jobs" / "data" / "set.py"]
    found = with_repository(diagnosis_of(*lines))
    assert found.job.folder_in_repository == "training/jobs"
    (run,) = to_sarif(found)["runs"]
    uris = [place["physicalLocation"]["artifactLocation"]["uri"] for place in run["results"][0]["locations"]]
    assert uris == ["training/jobs/train.py", "training/jobs/data/set.py"]
    assert run["originalUriBaseIds"]["PROJECT"]["uri"] == f"{tmp_path.as_uri()}/"


def test_the_repository_itself_and_none(tmp_path):
    here = diagnosis_of(tmp_path / "train.py")
    assert with_repository(here).job.folder_in_repository in (None, "")
    (tmp_path / ".git").mkdir()
    assert with_repository(here).job.folder_in_repository == ""
    nowhere = msgspec.structs.replace(here, findings=[])
    assert with_repository(nowhere) is nowhere
