"""Traces behind URLs, read as a stream: fsspec's memory file system and a local HTTP server."""

import functools
import hashlib
import http.server
import json
import threading
from pathlib import Path
from typing import ClassVar

import fsspec
import msgspec
import pytest
from fsspec.spec import AbstractBufferedFile

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace import find_traces, load_trace, load_traces
from ddpdoctor.trace.cache import cached_load
from ddpdoctor.trace.digest import write_digests
from ddpdoctor.trace.formats import HEAD_BYTES
from ddpdoctor.trace.sources import expand_url, is_url, redact_url
from tests.trace.trace_files import assert_same, document, events, rows_of, write


@pytest.fixture
def bucket(tmp_path):
    files = fsspec.filesystem("memory")
    for rank in range(2):
        local = write(tmp_path / f"rank{rank}.json.gz", document(events(30), rank=rank))
        files.pipe(f"/bucket/run/rank{rank}.json.gz", Path(local).read_bytes())
    files.pipe("/bucket/run/config.json", b'{"lr": 1}')
    yield tmp_path
    files.rm("/bucket", recursive=True)


def test_a_folder_a_pattern_and_a_file(bucket):
    expected = ("memory://bucket/run/rank0.json.gz", "memory://bucket/run/rank1.json.gz")
    found = [f.replace("memory:///", "memory://") for f in find_traces(["memory://bucket/run"]).files]
    assert tuple(found) == expected
    found = [f.replace("memory:///", "memory://") for f in find_traces(["memory://bucket/run/*.gz"]).files]
    assert tuple(found) == expected
    assert find_traces([expected[1]]).files == expected[1:]
    loaded = load_traces(expected, jobs=1, cache=True)
    assert [t.meta.rank for t in loaded.traces] == [0, 1] and loaded.traces[0].meta.source == expected[0]
    local = load_trace(str(bucket / "rank1.json.gz"))
    assert rows_of(loaded.traces[1]) == rows_of(local)


def test_what_is_missing_is_one_sentence(bucket):
    for call in (load_trace, lambda url: find_traces([url])):
        for url in ("memory://bucket/none.json", "nosuchscheme://x/y.json"):
            with pytest.raises(UnusableInput) as raised:
                call(url)
            assert url in str(raised.value) and "\n" not in str(raised.value)


class Tagged(http.server.SimpleHTTPRequestHandler):
    """Gives each file's content an entity tag, as object stores do; counts what is sent."""

    sent = 0

    def end_headers(self):
        content = Path(self.translate_path(self.path)).read_bytes()
        self.send_header("ETag", f'"{hashlib.md5(content).hexdigest()}"')
        super().end_headers()

    def do_GET(self):
        Tagged.sent += 1
        super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path):
    """Serves ``tmp_path``; gives its URL."""
    pytest.importorskip("aiohttp")
    handler = functools.partial(Tagged, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


def test_http(tmp_path, server):
    path = write(tmp_path / "rank3.json.gz", document(events(40), rank=3))
    url = f"{server}/rank3.json.gz"
    remote = load_traces(find_traces([url]).files).traces[0]
    assert remote.meta.source == url and rows_of(remote) == rows_of(load_trace(path))


def test_a_url_whose_content_has_a_tag_is_read_once(tmp_path, server, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write(tmp_path / "rank3.json.gz", document(events(40), rank=3))
    url = f"{server}/rank3.json.gz"
    first, read = cached_load(url), Tagged.sent
    assert_same(cached_load(url), first)
    assert Tagged.sent == read
    write(path, document(events(50), rank=3))
    assert cached_load(url).size == 150 and Tagged.sent > read


def test_a_url_without_a_tag_is_always_read(bucket, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(bucket / "cache"))
    assert cached_load("memory://bucket/run/rank0.json.gz").size == 90
    assert not (bucket / "cache").exists()


def test_a_digest_by_url(bucket):
    out = bucket / "out.columns"
    write_digests({str(bucket / "rank1.json.gz"): out})
    (made,) = bucket.glob("out-*.columns")
    fsspec.filesystem("memory").pipe("/bucket/digest/rank1.columns", made.read_bytes())
    found = find_traces(["memory://bucket/digest"]).files
    assert rows_of(load_trace(found[0])) == rows_of(load_trace(str(bucket / "rank1.json.gz")))


def test_what_is_a_url():
    assert all(map(is_url, ("s3://b/k", "memory://x", "http://h/x", "hf://datasets/a", "git+ssh://x")))
    assert not any(map(is_url, ("/a/b", "a.json", "C:\\x", "C://x", "dir/a:b", "://x")))


def test_local_files_are_the_same_by_url(tmp_path):
    path = write(tmp_path / "rank0.json", document(events(9)))
    remote = load_trace(f"file://{path}")
    assert_same(
        msgspec.structs.replace(remote, meta=msgspec.structs.replace(remote.meta, source=path)),
        load_trace(path),
    )


def test_secrets_in_a_url_are_in_no_note(bucket, monkeypatch):
    url = "memory://bucket/run/rank0.json.gz"
    monkeypatch.setattr("ddpdoctor.trace.load.redact_url", lambda file: file.replace("bucket", "***"))
    fsspec.filesystem("memory").pipe("/bucket/run/cut.json", b'{"traceEvents": [')
    loaded = load_traces([url, "memory://bucket/run/cut.json"], jobs=1)
    assert [trace.meta.source for trace in loaded.traces] == ["memory://***/run/rank0.json.gz"]
    assert "bucket" not in loaded.failed[0][1]
    assert redact_url("https://me:secret@host/t.json?sig=abcdefgh") == "https://***@host/t.json?sig=***"
    with pytest.raises(UnusableInput) as raised:
        load_trace("nosuchscheme://me:secret@host/t.json")
    assert "secret" not in str(raised.value)


def test_a_listing_that_names_files_of_this_machine_is_not_followed(bucket, monkeypatch):
    files = fsspec.filesystem("memory")
    named = ["file:///etc/passwd", "/bucket/run/rank0.json.gz"]
    monkeypatch.setattr(type(files), "find", lambda *_, **__: named)
    assert all(name.startswith("memory://") for name in expand_url("memory://bucket/run"))


class Store(fsspec.AbstractFileSystem):
    """Four traces of 8 MiB; counts what is fetched of them."""

    protocol = "counted"
    content = (json.dumps(document(events(30))) + " " * (8 << 20)).encode()
    fetched: ClassVar[list[int]] = []

    def find(self, path, **_):
        return [f"{path}/rank{rank}.json" for rank in range(4)]

    def isfile(self, path):
        return path.endswith(".json")

    def info(self, path, **_):
        return {"name": path, "size": len(self.content), "type": "file"}

    def _open(
        self, path, mode="rb", block_size=None, autocommit=True, cache_options=None, cache_type=None, **_
    ):
        return Stored(self, path, mode, block_size, cache_type=cache_type)


class Stored(AbstractBufferedFile):
    def _fetch_range(self, start, end):
        Store.fetched.append(end - start)
        return Store.content[start:end]


def test_of_what_a_store_lists_no_more_is_fetched_than_tells_what_it_is():
    fsspec.register_implementation("counted", Store, clobber=True)
    Store.fetched.clear()
    assert len(find_traces(["counted://bucket/run"]).files) == 4
    assert Store.fetched == [HEAD_BYTES] * 4
