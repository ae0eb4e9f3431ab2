"""Names of secrets in spellings that split no words, and words that only look like them."""

from __future__ import annotations

import pytest

from ddpdoctor.rundir.privacy import mask_command

_SECRET = "Tr0ub4dor"


@pytest.mark.parametrize(
    "command",
    [
        "train.py --PassWord=SECRET",
        "train.py --dbpass SECRET",
        "train.py --userpass u:SECRET",
        "train.py --clientsecret SECRET",
        "train.py --hftoken SECRET",
        "train.py --wandbkey SECRET",
        "train.py --passcode SECRET",
        "train.py --pin-code SECRET",
        "train.py --aes_key SECRET",
        "train.py --licence_key SECRET",
        "train.py logger.hftoken=SECRET",
        "env PGPASSWORD=SECRET python train.py",
        "train_net.py --num-gpus 8 WANDB.API_KEY SECRET SOLVER.LR 0.1",
        "aws configure set aws_secret_access_key SECRET",
        "7z x -pSECRET data.7z",
        "unzip -P SECRET data.zip",
        "sqlcmd -P SECRET",
    ],
)
def test_is_masked(command: str) -> None:
    masked = mask_command(command.replace("SECRET", _SECRET).split())
    assert masked == command.replace("u:SECRET", "***").replace("SECRET", "***").split()


@pytest.mark.parametrize(
    "command",
    [
        "train.py --hotkey a --monkey b --turkey c --keypoints 17 --compass n --bypass True --encompass x",
        "train.py --subtoken 3 --detoken x --padtoken <pad> --num_register_tokens 4 --cls_token true",
        "train.py --forward_pass x --lowpass 300 --image-key jpg --license MIT --access ro --secretary ann",
        "train_net.py MODEL.MASK_ON True DATASETS.TRAIN coco SOLVER.SORT_KEY length INPUT.PAD_TOKEN 0",
        "7z x -p data.7z",
        "train.py -p 3 -P 8",
        "train_net.py MODEL.USE_TOKEN True",
    ],
)
def test_stays(command: str) -> None:
    assert mask_command(command.split()) == command.split()
