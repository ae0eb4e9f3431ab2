"""The cache of parsed columns gives the same trace, and is never in the way."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace import cache, find_traces, load_trace, load_traces
from ddpdoctor.trace.archive import write_archive
from ddpdoctor.trace.load import read_traces
from tests.trace.nsight_export import export
from tests.trace.trace_files import assert_same, document, events, kernel, write

CONTENT = [*events(20), kernel("ncclDevKernel_x", 5, **{"Collective name": "allreduce", "Seq": 3})]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ddpdoctor" / "traces"


@pytest.fixture
def parses(monkeypatch):
    calls = []
    monkeypatch.setattr(cache, "load_trace", lambda *a: calls.append(a) or load_trace(*a))
    return calls


def entry_of(path):
    return cache._entry(path, "")


def test_the_second_time_nothing_is_parsed(tmp_path, home, parses):
    path = write(tmp_path / "a.json.gz", document(CONTENT))
    first, second = cache.cached_load(path), cache.cached_load(path)
    assert len(parses) == 1 and len(list(home.iterdir())) == 1
    assert_same(first, load_trace(path))
    assert_same(second, first)


def test_changed_content_is_parsed_anew(tmp_path, parses):
    path = write(tmp_path / "a.json", document(CONTENT))
    before = os.stat(path)
    cache.cached_load(path)
    text = Path(path).read_text()
    write(path, text.replace("aten::op1", "aten::OP1"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "aten::OP1" in cache.cached_load(path).names and len(parses) == 2


def test_a_changed_reader_reads_anew(tmp_path, monkeypatch, parses):
    path = write(tmp_path / "a.json", document(CONTENT))
    added = tmp_path / "formats" / "added.py"
    added.parent.mkdir()
    monkeypatch.setattr(cache.formats, "__path__", [*cache.formats.__path__, str(added.parent)])
    for number, code in enumerate(("def recognises(_): return False", "def recognises(_): return None"), 1):
        added.write_text(code)
        cache._code_hash.cache_clear()
        for _ in range(2):
            cache.cached_load(path)
        assert len(parses) == number
    cache._code_hash.cache_clear()


def test_a_copy_elsewhere_has_its_own_path_rank_and_host(tmp_path, parses):
    path = write(tmp_path / "node1_4711.16941282015450.pt.trace.json", CONTENT[:-9])
    there = str(tmp_path / "rank-5.json")
    shutil.copy(path, there)
    assert cache.cached_load(path).meta.host == "node1"
    assert_same(cache.cached_load(there), load_trace(there))
    assert_same(cache.cached_load(there, 2), load_trace(there, 2))
    assert len(parses) == 1


def test_a_rank_given_by_one_reader_is_not_kept_for_the_next(tmp_path, parses):
    """A run directory's trace is read with the rank of its folder; alone, it is of the rank that it says itself."""
    path = write(tmp_path / "trace.json.gz", document(CONTENT, distributedInfo={"rank": 3, "world_size": 4}))
    assert cache.cached_load(path, 1).meta.rank_from == "run directory"
    assert_same(cache.cached_load(path), load_trace(path))
    assert cache.cached_load(path).meta.rank == 3 and len(parses) == 1


def test_each_rank_of_an_export_of_several_is_kept(tmp_path, home, parses):
    traces = [load_trace(write(tmp_path / f"{rank}.json", document(CONTENT, rank))) for rank in (0, 1)]
    files = find_traces([export(tmp_path / "report.sqlite", traces)]).files
    first = [cache.cached_load(file) for file in files]
    second = [cache.cached_load(file) for file in files]
    assert len(parses) == len(list(home.iterdir())) == len(files) == 2
    for made, again in zip(first, second, strict=True):
        assert_same(again, made)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "text"])
def test_a_damaged_entry_is_replaced(tmp_path, home, parses, damage):
    path = write(tmp_path / "a.json", document(CONTENT))
    cache.cached_load(path)
    entry = next(home.iterdir())
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 0xFF
    entry.write_bytes({"cut": data[:300], "flip": bytes(data), "empty": b"", "text": b"no archive"}[damage])
    assert_same(cache.cached_load(path), load_trace(path))
    assert len(parses) == 2
    cache.cached_load(path)
    assert len(parses) == 2


def test_an_entry_of_another_schema_is_replaced(tmp_path, monkeypatch, parses):
    """Even if its key were the same."""
    path = write(tmp_path / "a.json", document(CONTENT))
    with monkeypatch.context() as older:
        older.setattr("ddpdoctor.trace.archive.SCHEMA", "ddpdoctor.columns/1")
        cache.cached_load(path)
    for _ in range(2):
        assert_same(cache.cached_load(path), load_trace(path))
    assert len(parses) == 2


def test_a_file_that_changes_while_it_is_read_is_not_kept(tmp_path, home, monkeypatch):
    path = write(tmp_path / "a.json", document(CONTENT))

    def grows(*arguments):
        write(path, document([*CONTENT, *CONTENT]))
        return load_trace(*arguments)

    monkeypatch.setattr(cache, "load_trace", grows)
    cache.cached_load(path)
    assert not home.exists()


def test_no_cache_leaves_nothing_behind(tmp_path, home):
    path = write(tmp_path / "a.json", document(CONTENT))
    load_traces([path], cache=False)
    assert not home.exists()


@pytest.fixture
def all_worth_it(monkeypatch):
    monkeypatch.setattr("ddpdoctor.trace.load._WORTH_KEEPING_BYTES", 0)


def test_what_is_read_in_no_time_is_not_kept(tmp_path, home):
    path = write(tmp_path / "a.json", document(CONTENT))
    assert load_traces([path], cache=True).traces[0].size == 61
    assert not home.exists()


def test_concurrent_processes(tmp_path, home, monkeypatch, all_worth_it):
    monkeypatch.setattr("ddpdoctor.trace.load._WORTH_PROCESSES_BYTES", 0)
    path = write(tmp_path / "a.json", document(CONTENT))
    copies = [path, *(shutil.copy(path, tmp_path / f"{i}.json") for i in range(3))]
    copies = [str(copy) for copy in copies]
    for _ in range(2):
        traces = [trace for _, trace, _ in read_traces(copies, jobs=2, cache=True)]
        assert {trace.size for trace in traces} == {61}
    assert len(list(home.iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_no_trouble(tmp_path, home, parses):
    home.parent.parent.write_text("a file where the folder should be")
    path = write(tmp_path / "a.json", document(CONTENT))
    assert cache.cached_load(path).size == cache.cached_load(path).size == 61
    assert len(parses) == 2


def test_concurrent_users(tmp_path, home):
    path = write(tmp_path / "a.json", document(CONTENT))
    found, errors = [], []

    def use():
        try:
            found.append(cache.cached_load(path))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and {t.size for t in found} == {61}
    assert [entry.suffix for entry in home.iterdir()] == [".cached"]


def test_the_oldest_entries_go_first(tmp_path, home, monkeypatch):
    paths = [write(tmp_path / f"{i}.json", document(events(20 + i))) for i in range(3)]
    for path in paths[:2]:
        cache.cached_load(path)
    entries = sorted(home.iterdir(), key=lambda f: f.stat().st_mtime)
    os.utime(entry_of(paths[0]), (1, 1))
    monkeypatch.setattr(cache, "LIMIT_BYTES", sum(f.stat().st_size for f in entries) * 5 // 4)
    cache.cached_load(paths[2])
    assert not entry_of(paths[0]).exists() and entry_of(paths[1]).exists() and entry_of(paths[2]).exists()


def test_the_folder_is_looked_through_once_for_many_entries(tmp_path, monkeypatch):
    looks = []
    monkeypatch.setattr(cache, "keep_newest", lambda *given, **limits: looks.append(given))
    monkeypatch.setattr(cache, "_written_bytes", float("inf"))
    for i in range(5):
        cache.cached_load(write(tmp_path / f"{i}.json", document(events(20 + i))))
    assert len(looks) == 1


def test_entries_are_no_traces_and_errors_stay_errors(tmp_path, home, all_worth_it):
    path = write(tmp_path / "a.json", document(CONTENT))
    load_traces([path], cache=True)
    with pytest.raises(UnusableInput):
        find_traces([str(home)])
    with pytest.raises(UnusableInput, match="no list"):
        load_traces([write(tmp_path / "b.json", "{}")], cache=True)
    with pytest.raises(UnusableInput, match="no such file"):
        cache.cached_load(str(tmp_path / "c.json"))


@pytest.mark.parametrize("what", ["folder", "link", "entry"])
def test_what_somebody_else_may_have_written_is_read_anew(tmp_path, home, parses, what):
    path = write(tmp_path / "a.json", document(CONTENT))
    cache.cached_load(path)
    (entry,) = home.iterdir()
    if what == "folder":
        home.chmod(0o777)
    elif what == "entry":
        entry.chmod(0o666)
    else:
        entry.rename(tmp_path / "planted")
        entry.symlink_to(tmp_path / "planted")
    assert_same(cache.cached_load(path), load_trace(path))
    assert len(parses) == 2


def test_an_entry_that_holds_what_cannot_be_is_replaced(tmp_path, home, parses):
    path = write(tmp_path / "a.json", document(CONTENT))
    trace = cache.cached_load(path)
    trace.name[3] = 10**6
    with entry_of(path).open("wb") as stream:
        write_archive(stream, trace)
    for _ in range(2):
        assert_same(cache.cached_load(path), load_trace(path))
    assert len(parses) == 2
