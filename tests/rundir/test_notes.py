"""Notes keep their codes from whoever writes them to whoever decides by them."""

from ddpdoctor.rundir import Note, NoteCode, recorded_notes
from ddpdoctor.rundir.reader import RunDirectory

NO_GPU = "No GPU telemetry: NVML Shared Library Not Found (NVML)."
NO_RANK = "no rank was recorded: sleep ended without any Python process in which ..."


def test_a_note_says_of_whom_it_is_and_keeps_its_code():
    note = Note(NO_GPU, NoteCode.NO_GPU)
    assert note.of("Host a") == Note(f"Host a: {NO_GPU}", NoteCode.NO_GPU)
    assert note.of_rank(3) == Note(f"Rank 3: {NO_GPU}", NoteCode.NO_GPU, (3,))
    assert str(note) == NO_GPU


def test_the_code_decides_and_not_the_sentence():
    assert recorded_notes([NO_GPU], [NoteCode.NO_RANK.value]) == [Note(NO_GPU, NoteCode.NO_RANK)]


def test_recordings_from_before_there_were_codes_have_those_of_today():
    assert recorded_notes([NO_RANK, NO_GPU, f"It said: {NO_GPU}"], []) == [
        Note(NO_RANK, NoteCode.NO_RANK),
        Note(NO_GPU, NoteCode.NO_GPU),
        Note(f"It said: {NO_GPU}"),
    ]


def test_nothing_follows_from_a_code_of_a_later_version():
    assert recorded_notes([NO_GPU], ["of_a_later_version"]) == [Note(NO_GPU)]


def test_what_is_there_and_cannot_be_read_is_told_as_such(tmp_path):
    (tmp_path / "manifest.json").write_text('{"schema": "ddpdoctor.run/1", ')
    (tmp_path / "ranks" / "00002").mkdir(parents=True)
    (tmp_path / "ranks" / "00002" / "rank.json").write_text("[")
    (tmp_path / "ranks" / "00003").symlink_to(tmp_path)
    notes = RunDirectory.open(str(tmp_path)).notes
    assert [(note.code, note.ranks) for note in notes] == [
        (NoteCode.UNREADABLE, ()),
        (NoteCode.UNREADABLE, (2,)),
        (NoteCode.TOLD, (3,)),
    ]
