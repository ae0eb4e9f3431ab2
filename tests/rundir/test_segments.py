"""A piece of a stream finds the descriptor that its mapping holds without a look at all that the job has open."""

from __future__ import annotations

import os

from ddpdoctor.rundir import segments
from ddpdoctor.rundir.owned import file_identity


def test_the_descriptor_of_its_mapping_is_found_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "listdir", lambda _: (_ for _ in ()).throw(AssertionError("listed")))
    folder = os.open(tmp_path, os.O_RDONLY)
    segment = segments.Segment("0", folder, 0, 4096)
    assert segment._handle >= 0 and file_identity(segment._handle) == segment._file
    segment.close()


def test_it_is_found_where_another_thread_opened_a_file_meanwhile(tmp_path, monkeypatch):
    folder, closed, opened = os.open(tmp_path, os.O_RDONLY), os.close, []

    def close(handle):
        closed(handle)
        opened.append(os.open(os.devnull, os.O_RDONLY))

    monkeypatch.setattr(os, "close", close)
    segment = segments.Segment("0", folder, 0, 4096)
    monkeypatch.undo()
    assert opened and file_identity(segment._handle) == segment._file
    segment.close()
    for handle in opened:
        closed(handle)
