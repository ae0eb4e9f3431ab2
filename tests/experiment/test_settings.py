"""What can be tried, as the command line takes it."""

from __future__ import annotations

import pytest

from ddpdoctor.experiment import parse_setting, proposals_for, setting_of
from ddpdoctor.experiment.settings import Results, SettingError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("loader.num_workers=4", 4),
        ("loader.pin_memory=yes", True),
        ("ddp.bucket_cap_mb=0.5", 0.5),
        ("ddp.comm_hook=bf16", "bf16"),
        ("env.NCCL_BUFFSIZE=8388608", "8388608"),
        ("env.OMP_NUM_THREADS=2", "2"),
    ],
)
def test_values(text, value):
    assert parse_setting(text) == (text.partition("=")[0], value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("loader.num_workers", "NAME"),
        ("loader.num_workers=many", "0 to 1024"),
        ("loader.num_workers=-1", "0 to 1024"),
        ("loader.num_wokers=4", "loader.num_workers"),
        ("ddp.comm_hook=fp8", "fp16 or bf16"),
        ("ddp.bucket_cap_mb=nan", "above 0"),
        ("ddp.bucket_cap_mb=1e300", "above 0"),
        ("loader.pin_memory=maybe", "true or false"),
        ("env.PATH=/tmp", "only variables that tune"),
        ("env.LD_PRELOAD=x.so", "only variables that tune"),
        ("env.DDPDOCTOR_RUN=x", "only variables that tune"),
        ("speed=fast", "not a setting"),
        (f"env.NCCL_ALGO={'x' * 3000}", "at most 2,000 letters"),
    ],
)
def test_what_is_refused_says_what_would_be_right(text, says):
    with pytest.raises(SettingError) as raised:
        parse_setting(text)
    assert says in str(raised.value) or says == "NAME"
    assert "\n" not in str(raised.value)


def test_several_settings_are_tried_one_by_one_and_together():
    found = proposals_for([("loader.num_workers", 4), ("loader.pin_memory", True)])
    assert [proposal.words for proposal in found] == [
        "loader.num_workers=4",
        "loader.pin_memory=true",
        "loader.num_workers=4 loader.pin_memory=true",
    ]


def test_what_nobody_can_train_with_says_so():
    assert setting_of("loader.instant").is_bound
    assert not setting_of("loader.num_workers").is_bound
    assert setting_of("ddp.comm_hook").results is Results.OTHER
