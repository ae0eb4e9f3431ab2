"""Patches of constructors: only literal keywords, only where there is no doubt."""

from __future__ import annotations

import subprocess
import textwrap

import pytest

from ddpdoctor.experiment import patch_of

SCRIPT = textwrap.dedent(
    """\
    from torch.utils.data import DataLoader
    # größe
    loader = DataLoader(data, batch_size=8, num_workers=0, pin_memory=False)
    other = DataLoader(
        data,
        batch_size=8,  # per rank
        sampler=sampler,
    )
    spread = DataLoader(data, **options)
    chosen = DataLoader(data, num_workers=args.workers)
    two = [DataLoader(a), DataLoader(b)]
    model = torch.nn.parallel.DistributedDataParallel(net, device_ids=[0])
    """
)


def applied(tmp_path, diff: str) -> str:
    (tmp_path / "train.py").write_text(SCRIPT)
    subprocess.run(["patch", "-p1"], input=diff, text=True, cwd=tmp_path, check=True, capture_output=True)
    return (tmp_path / "train.py").read_text()


@pytest.mark.parametrize(
    ("line", "settings", "holds"),
    [
        (3, {"loader.num_workers": 4}, "DataLoader(data, batch_size=8, num_workers=4, pin_memory=False)"),
        (3, {"loader.num_workers": 4, "loader.persistent_workers": True}, "num_workers=4, pin_memory=False, persistent_workers=True)"),
        (5, {"loader.num_workers": 2}, "sampler=sampler, num_workers=2,\n"),
        (12, {"ddp.bucket_cap_mb": 50.0}, "device_ids=[0], bucket_cap_mb=50.0)"),
    ],
)  # fmt: skip
def test_a_patch_changes_the_call_and_nothing_else(tmp_path, line, settings, holds):
    diff = patch_of(SCRIPT, "train.py", line, settings)
    changed = applied(tmp_path, diff)
    assert holds in changed
    assert sum(a != b for a, b in zip(SCRIPT.splitlines(), changed.splitlines(), strict=True)) == 1


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        (9, {"loader.num_workers": 4}),
        (10, {"loader.num_workers": 4}),
        (11, {"loader.num_workers": 4}),
        (2, {"loader.num_workers": 4}),
        (99, {"loader.num_workers": 4}),
        (3, {"loader.num_workers": 0}),
        (3, {"ddp.comm_hook": "bf16"}),
        (3, {"loader.instant": True}),
        (3, {"loader.num_workers": 4, "ddp.bucket_cap_mb": 1.0}),
        (3, {"env.NCCL_BUFFSIZE": "1"}),
    ],
    ids=[
        *("**options", "not a literal", "two on the line", "a comment", "beyond", "as it is"),
        *("no argument", "a bound", "two calls", "environment"),
    ],
)
def test_where_there_is_doubt_there_is_no_patch(line, settings):
    assert patch_of(SCRIPT, "train.py", line, settings) is None


@pytest.mark.parametrize(
    ("call", "settings"),
    [
        ("DataLoader(data, 8, False, sampler, None, 0)", {"loader.num_workers": 4}),
        ("DataLoader(data, 8, False, sampler, None, 0, None, False)", {"loader.pin_memory": True}),
        ("DistributedDataParallel(net, None, None, 0, True)", {"ddp.broadcast_buffers": False}),
    ],
)
def test_what_may_be_given_by_its_place_is_not_given_twice(call, settings):
    assert patch_of(f"{call}\n", "train.py", 1, settings) is None


@pytest.mark.parametrize(
    "text",
    [
        "loader = DataLoader(data, num_workers=0)",
        "import x\r\nloader = DataLoader(data, num_workers=0)\r\nother = 1\r\n",
        "import x\n\x0c\nloader = DataLoader(data, num_workers=0)\n\x0c\nother = 1\n",
    ],
    ids=["no newline at the end", "CRLF", "form feeds"],
)
def test_a_patch_applies_whatever_ends_the_lines(tmp_path, text):
    diff = patch_of(text, "train.py", None, {"loader.num_workers": 4})
    (tmp_path / "train.py").write_bytes(text.encode())
    subprocess.run(
        ["patch", "-p1"], input=diff.encode(), cwd=tmp_path, check=True, capture_output=True, timeout=60
    )
    assert (tmp_path / "train.py").read_bytes().decode() == text.replace("num_workers=0", "num_workers=4")


@pytest.mark.filterwarnings("error")
def test_what_python_warns_about_in_the_file_is_not_repeated():
    text = 'loader = DataLoader(data, num_workers=0)\npattern = "\\d"\nassert 1 is 1\n'
    diff = patch_of(text, "train.py", None, {"loader.num_workers": 4})
    assert diff is not None and "+loader = DataLoader(data, num_workers=4)" in diff


def test_a_file_that_does_not_parse():
    assert patch_of("def broken(:\n", "train.py", 1, {"loader.num_workers": 4}) is None
