"""Which files are traces, and whose."""

import gzip
import json

import pytest

from ddpdoctor.errors import UnusableInput
from ddpdoctor.trace import find_traces
from ddpdoctor.trace.sources import host_of_name, rank_of_name
from tests.trace.trace_files import SHARED, document, events, write


def test_folders_are_searched_by_content(tmp_path):
    trace = document(events(3))
    (tmp_path / "deep" / ".hidden").mkdir(parents=True)
    good = [
        write(tmp_path / "a.json", trace),
        write(tmp_path / "b.pt.trace.json.gz", trace),
        write(tmp_path / "deep" / "list.json", events(3)),
        write(tmp_path / "deep" / "no_suffix", trace),
        write(tmp_path / "deep" / "really_gzip.json", gzip.compress(json.dumps(trace).encode())),
        write(
            tmp_path / "pointer.json.gz",
            gzip.decompress(gzip.compress(b"version https://git-lfs.github.com/spec/v1")),
        ),
    ]
    (tmp_path / "pointer.json.gz").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    write(tmp_path / "deep" / ".hidden" / "c.json", trace)
    write(tmp_path / "config.json", {"lr": 1})
    write(tmp_path / "train.py", "import torch")
    write(tmp_path / "model.pt", b"PK\x03\x04")
    found = find_traces([str(tmp_path)])
    assert sorted(found.files) == sorted(good)
    passed_over = tmp_path / "config.json"
    assert found.notes == (f"1 JSON file(s) hold no profiler events and were skipped: {passed_over}.",)


def test_files_that_are_passed_over_are_known_by_their_ranks(tmp_path):
    write(tmp_path / "rank0.json", document(events(2), rank=0))
    skipped = [write(tmp_path / f"rank{rank}.json", {}) for rank in (1, 2, 3, 5, 7, 8, 9)]
    (note,) = find_traces([str(tmp_path)]).notes
    assert note.endswith(f"skipped: {', '.join(skipped[:3])} and those of ranks 5 and 7 to 9.")
    write(tmp_path / "z.json", {})
    (note,) = find_traces([str(tmp_path)]).notes
    assert note.endswith(f"skipped: {', '.join(skipped[:3])} and 5 more.")


def test_patterns_and_single_files(tmp_path):
    files = [write(tmp_path / f"rank{i}.json", document(events(2), rank=i)) for i in range(3)]
    assert find_traces([str(tmp_path / "rank[01].json")]).files == tuple(files[:2])
    assert find_traces([files[2], str(tmp_path / "*.json")]).files == (files[2], *files[:2])
    odd = write(tmp_path / "[1].json", {})
    assert find_traces([odd]).files == (odd,), "a file that is named itself is left for the loader to judge"


def test_nothing_found_is_one_sentence(tmp_path):
    with pytest.raises(UnusableInput, match="No profiler trace in"):
        find_traces([str(tmp_path)])
    with pytest.raises(UnusableInput, match="does not exist"):
        find_traces([str(tmp_path / "no" / "such*")])


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not here")
def test_public_traces_are_all_found():
    files = find_traces([str(SHARED)]).files
    assert len(files) == len(list(SHARED.rglob("*.json.gz")))


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz", 34),
        ("trace_8_rank_1.json", 1),
        ("rank0.json", 0),
        ("rank_0007.json.gz", 7),
        ("RANK=12.json", 12),
        ("global_rank_5_local_rank_1.json", 5),
        ("local_rank_1.json", None),
        ("worker3_step_12.1694128201557.pt.trace.json", 3),
        ("worker0.pt.trace.json.gz", 0),
        ("profile_r5_x.json", 5),
        ("r11.json", 11),
        ("ip-172-31-16-248.us-east-2.compute.internal_85866.1698107929560561434.pt.trace.json.gz", None),
        ("worker3_4711.1698107929560561434.pt.trace.json.gz", None),
        ("rank_2/trace.json.gz", 2),
        ("/data/job/worker1/host_4711.1698107929560561434.pt.trace.json", 1),
        ("for5.json", None),
        ("frank7.json", None),
        ("resnet50.json", None),
        ("ddp_trainer_6.json", 6),
    ],
)
def test_rank_of_a_file_name(path, rank):
    assert rank_of_name(path) == rank


def test_host_of_a_file_name():
    assert host_of_name("/x/node-7.cluster_85866.1698107929560561434.pt.trace.json.gz") == "node-7.cluster"
    assert host_of_name("rank0.json") is None
