"""Modules that a command imports before it starts, which every user waits for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from ddpdoctor.cli.capture import MAX_STEPS
from ddpdoctor.cli.main import VERBS
from ddpdoctor.rundir.requests import MOST_CAPTURE_STEPS

ROOT = Path(__file__).resolve().parents[2]
WORDS_ALONE = {"click"}
"""Packages of others that help, the version and usage errors need."""
OF_RUNS = {"rundir", "diagnose", "measure", "report", "stall", "trace", "analysis", "experiment"}
"""Packages of ddpdoctor that help does not import."""
TRACES = WORDS_ALONE | {"numpy", "msgspec", "typing_extensions", "rich", "cel", "jinja2", "markupsafe"}
"""Packages of others that an analysis of traces needs; Jinja2 where there is a finding."""
TRACE_FILES = sorted(ROOT.glob("fixtures/barrier/ranks/*/trace.json.gz"))
OTHERS_NEED = {
    "ddpdoctor.analysis.dataframes": "polars",
    "ddpdoctor.report.charts": "HTML reports",
    "ddpdoctor.report.redaction": "--redact",
    "ddpdoctor.rundir.draining": "run directories",
    "ddpdoctor.rundir.liveness": "run directories",
    "ddpdoctor.stall.evidence": "run directories",
    "ddpdoctor.stall.recording": "dumps of flight recorders",
    "ddpdoctor.trace.clusters": "Dask and Ray",
    "ddpdoctor.trace.formats.nsight.reader": "exports of Nsight Systems",
    "asyncio": "nobody",
    "concurrent.futures": "several processes",
    "importlib.metadata": "packages that bring rules",
    "multiprocessing": "several processes",
    "rich.markdown": "nobody",
    "rich.progress": "terminals",
    "rich.syntax": "colours",
    "socket": "several processes",
    "sqlite3": "exports of Nsight Systems",
    "subprocess": "nobody",
    "zipfile": "the cache of traces",
}
"""Modules that an analysis of small traces, written to a pipe, does without, and who needs them."""


def imported(code, **environment):
    """Names of the modules that ``code`` imports, in an interpreter of its own."""
    script = f"import sys; before = set(sys.modules)\n{code}\nprint('imported', *(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT), **environment},
    )
    first, *names = done.stdout.splitlines()[-1].split()
    assert first == "imported", done.stdout
    return names


def of_others(names):
    """The packages in ``names`` that are neither ours nor Python's."""
    packages = {name.partition(".")[0] for name in names}
    return {name for name in packages - sys.stdlib_module_names - {"ddpdoctor"} if not name.startswith("_")}


LINES = (
    ["--version"],
    ["--help"],
    *([verb, "--help"] for verb in VERBS),
    *(["rules", verb, "--help"] for verb in ("list", "show", "test", "facts", "new")),
    ["nonsense"],
    ["analyze"],
    ["analyze", "--fail-on", "nothing", "traces"],
    ["compare", "one"],
    ["run"],
    ["try", "--rounds", "many"],
    ["rules", "nonsense"],
    ["export", "traces"],
)


def test_help_and_usage_errors_import_neither_the_analysis_nor_what_it_needs():
    """All in one interpreter: what one line may not import, no other may, and the lines are told apart where one does."""
    code = f"""
from ddpdoctor.cli.main import main
had = set(sys.modules)
for words in {LINES!r}:
    sys.argv = ['ddpdoctor', *words]
    try:
        main()
    except SystemExit:
        pass
    print('line', repr((words, sorted(set(sys.modules) - had))))
    had = set(sys.modules)
"""
    script = f"import sys\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    told = [ast.literal_eval(line[5:]) for line in done.stdout.splitlines() if line.startswith("line (")]
    assert [words for words, _ in told] == [*LINES]
    for words, names in told:
        assert of_others(names) <= WORDS_ALONE, words
        rooms = {name.split(".")[1] for name in names if name.startswith("ddpdoctor.")}
        assert rooms.isdisjoint(OF_RUNS), words
    assert of_others(imported("import ddpdoctor.cli.main")) >= WORDS_ALONE


def test_most_capture_steps_is_the_same_in_cli_and_rundir():
    assert MAX_STEPS == MOST_CAPTURE_STEPS


def test_a_job_is_started_without_the_analysis():
    assert of_others(imported("import ddpdoctor.cli.run")) <= WORDS_ALONE


@pytest.mark.parametrize(("option", "unneeded"), [("--static", set()), ("--quiet", {"rich"})])
def test_traces_are_analysed_without_what_only_others_need(tmp_path, option, unneeded):
    code = (
        "from ddpdoctor.cli.main import cli\n"
        f"cli(['analyze', {option!r}, *{[str(file) for file in TRACE_FILES]}], standalone_mode=False)"
    )
    for _ in range(2):
        # What the first call imports to check the rules, the second finds checked.
        names = imported(code, XDG_CACHE_HOME=str(tmp_path))
    # Where extras are installed, a faster gzip is used.
    assert of_others(names) - {"isal"} <= TRACES - unneeded
    assert set(names) & set(OTHERS_NEED) == set()


def test_a_process_that_reads_traces_imports_no_more_than_that_takes():
    names = imported(
        f"from ddpdoctor.trace.processes import read_one\nassert read_one({str(TRACE_FILES[0])!r}, None, False)[0] is not None"
    )
    assert of_others(names) - {"isal"} <= {"numpy", "msgspec", "typing_extensions"}
    assert set(names) & {*OTHERS_NEED, "logging", "numpy.ma", "shutil", "ddpdoctor.rundir.spool"} == set()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(("set_by_user", "left"), [({}, None), ({"OPENBLAS_NUM_THREADS": "2"}, "2")])
def test_the_analysis_limits_openblas_threads_and_not_the_jobs(tmp_path, set_by_user, left):
    code = (
        "import os\n"
        "from ddpdoctor.cli.main import cli\n"
        "cli(['analyze', '-q', '--no-cache', '--jobs', '1', 'fixtures/barrier'], standalone_mode=False)\n"
        "print(repr((len(os.listdir('/proc/self/task')), os.environ.get('OPENBLAS_NUM_THREADS'))))"
    )
    environment = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path), **set_by_user}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    )
    threads, variable = ast.literal_eval(done.stdout.splitlines()[-1])
    assert variable == left
    assert threads == 1 or set_by_user
