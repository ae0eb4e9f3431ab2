"""The demo's job and the list of its faults; ``test_road`` has each of them trained."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from ddpdoctor.cli.demo import command
from ddpdoctor.demo import FAULTS, JOB, find_fault
from ddpdoctor.errors import DdpDoctorError

RULES = Path(__file__).resolve().parents[2] / "rules"


def test_the_job_knows_nothing_of_ddpdoctor():
    assert "ddpdoctor" not in JOB.read_text()


def test_each_fault_is_planted_in_the_job():
    text = JOB.read_text()
    for fault in FAULTS:
        assert fault.name == "healthy" or f'"{fault.name}"' in text, fault


def test_each_expected_rule_exists():
    for fault in FAULTS:
        assert fault.expected_rule is None or (RULES / f"{fault.expected_rule}.yaml").is_file(), fault


def test_names_are_unique_and_an_unknown_one_is_refused_with_the_known_ones():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert find_fault("barrier").expected_rule == "sync/explicit-barrier"
    with pytest.raises(DdpDoctorError, match=r"no fault called nonsense; there are healthy, slow-data,"):
        find_fault("nonsense")


def test_the_list_names_every_fault():
    result = CliRunner().invoke(command, ["--list"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines()] == [fault.name for fault in FAULTS]


def test_without_torch_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(command, [])
    assert isinstance(result.exception, DdpDoctorError)
    assert "pip install '.[torch]'" in str(result.exception)
