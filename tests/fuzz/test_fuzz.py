"""A few mutated files of each kind that our own readers take; ``make fuzz`` tries ten thousand of all kinds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEED, CASES = 1, 20
KINDS = ("bundle", "config", "report", "rule", "telemetry")


def fuzz(code: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: workers are forked, which a process with threads must not do."""
    program = f"import sys; from tests.fuzz import __main__ as fuzz, trial; {code}"
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=500
    )


def test_mutated_files_end_in_a_diagnosis_or_in_one_sentence(tmp_path):
    chosen = ["--seed", str(SEED), "--cases", str(CASES), "--keep", str(tmp_path / "kept")]
    chosen += [word for kind in KINDS for word in ("--only", kind)]
    done = fuzz(f"sys.exit(fuzz.main({chosen!r}))")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{CASES} cases, 0 failures" in done.stdout


def test_clients_of_the_metrics_do_not_keep_a_scrape_from_its_answer():
    done = fuzz(
        "fuzz.clients.failures.__defaults__ = (200,); sys.exit(fuzz.main(['--seed', '1', '--only', 'metric-clients']))"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_reader_whose_time_grows_with_the_square_is_seen():
    program = "fuzz.growth.LEAST_S = 0; fuzz.growth.TEXTS = {}; fuzz.growth.PICKLES = {'zeros': bytes}; "
    program += "fuzz.growth.read_plain = lambda data: sum(1 for _ in data for _ in data); "
    done = fuzz(program + "print(list(fuzz.growth.failures(1000)))")
    assert "for the whole" in done.stdout, done.stdout + done.stderr


def test_a_failure_is_seen_kept_and_can_be_repeated(tmp_path):
    """With no time at all every case fails."""
    chosen = ["--seed", "5", "--case", "3", "--only", "rule", "--keep", str(tmp_path)]
    done = fuzz(f"trial.MOST_S = 0.001; sys.exit(fuzz.main({chosen!r}))")
    assert done.returncode == 1 and "no end within" in done.stdout, done.stdout + done.stderr
    assert "python -m tests.fuzz --seed 5 --case 3 --only rule" in done.stdout
    assert (tmp_path / "5-3" / "case").read_text() and (tmp_path / "5-3" / "in").is_dir()
