"""Nothing secret reaches the run directory, and nothing useful is lost."""

import json
import shlex
from pathlib import Path

import pytest

from ddpdoctor.rundir.privacy import LONGEST_COMMAND, mask_command, mask_text, recorded_environment
from tests.launch.launched import clean_environment, run_under

SECRET = "q7Rt2Xv9Lm4Zp8Kw1Bn6"
HARMLESS = (Path(__file__).parent / "harmless_commands.txt").read_text().splitlines()
"""Command lines as people start training with them."""


@pytest.mark.parametrize(
    "command",
    [
        ["train.py", "--api-key", SECRET],
        ["train.py", "--api_key=" + SECRET],
        ["train.py", "--apiKey", "plain"],
        ["train.py", "--password", "hunter2"],
        ["train.py", "--password=hunter2"],
        ["train.py", "-token", "abc"],
        ["train.py", "logger.wandb.api_key=abcdef"],
        ["env", "WANDB_API_KEY=abcdef", "python", "train.py"],
        ["env", "AWS_SECRET_ACCESS_KEY=abcdef", "python"],
        ["sh", "-c", "export HF_TOKEN=abcdef; python train.py"],
        ["sh", "-c", "python train.py --auth-token abcdef --lr 1"],
        ["train.py", "--hub", "hf_abcdefghijkl"],
        ["train.py", "ghp_abcdefghijklmnop1234"],
        ["train.py", "AKIAIOSFODNN7EXAMPLE"],
        ["train.py", "sk-abcdefghijklmnopqrst"],
        ["train.py", "--db", "postgres://user:abcdef@host/db"],
        ["train.py", "https://bucket/file?X-Amz-Signature=abcdef&a=1"],
        ["train.py", "https://account.blob.core.windows.net/c?sv=1&sig=abcdef"],
        ["curl", "-H", "Authorization: Bearer abcdefgh"],
        ["train.py", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc"],
        ["train.py", "--run-name", SECRET],
        ["train.py", "--id=" + "9f86d081884c7d659a2feaa0c55ad015"],
    ],
)
def test_secrets_are_masked(command):
    masked = mask_command(command)
    assert len(masked) == len(command)
    assert "***" in " ".join(masked)
    for secret in (SECRET, "hunter2", "abcdef", "plain", "AKIA", "eyJ", "9f86"):
        assert secret not in " ".join(masked)


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "--nproc-per-node", "8", "--rdzv-endpoint=node1:29500", "train.py", "--lr", "1e-4"],
        ["train.py", "--max-tokens", "2048", "--tokenizer", "gpt2", "--num_tokens=5", "--author", "me"],
        [
            "train.py",
            "--pin-memory",
            "--pin_memory",
            "True",
            "--pin",
            "true",
            "--login-node",
            "n1",
            "--tok",
            "13a",
        ],
        ["train.py", "--token-file", "secrets.txt", "--key", "label", "--monkey=1"],
        [
            "train.py",
            "--data",
            "/datasets/imagenet-1k/train-00000-of-01024.tar",
            "--model",
            "resnet50_a1_in1k",
        ],
        ["train.py", "--name", "bert-base-uncased-finetuned-sst2-seed42-bs256-lr3e5"],
        ["train.py", "s3://bucket/data?versionId=3", "https://host/path"],
        ["python", "-m", "pkg.train", "optim.lr=0.1", "+trainer.devices=2"],
        ["train.py", "--job", "123e4567-e89b-12d3-a456-426614174000", "2026-11-21T00:42:06.123456"],
    ],
)
def test_harmless_arguments_stay_readable(command):
    assert mask_command(command) == command


@pytest.mark.parametrize("line", HARMLESS)
def test_command_lines_of_training_stay_as_they_are(line):
    assert mask_command(shlex.split(line)) == shlex.split(line)
    assert mask_text(line) == line


@pytest.mark.parametrize(
    ("command", "masked"),
    [
        (["run", "--env=HF_TOKEN=a b"], ["run", "--env=HF_TOKEN=***"]),
        (["t.py", "--kaggle_key", "a", "--wandb_api=a"], ["t.py", "--kaggle_key", "***", "--wandb_api=***"]),
        (["t.py", "--creds", "u:p"], ["t.py", "--creds", "***"]),
        (["t.py", "--login", "u/p", "--tokens.hf=a", "--hf_tok", "a"], ["t.py", "--login", "***", "--tokens.hf=***", "--hf_tok", "***"]),
        (["t.py", "--login=u", "--otp", "123456", "--pin", "1234"], ["t.py", "--login=***", "--otp", "***", "--pin", "***"]),
        (["env", "FI_KEY=a", "FI_PROVIDER=efa", "t.py"], ["env", "FI_KEY=***", "FI_PROVIDER=efa", "t.py"]),
        (["bash", "-c", "t.py --login u:p --creds 'u:p' --lr 1"], ["bash", "-c", "t.py --login *** --creds *** --lr 1"]),
        (["bash", "--login", "-c", "t.py --lr 1"], ["bash", "--login", "-c", "t.py --lr 1"]),
        (["bash", "--login", "train.sh"], ["bash", "--login", "train.sh"]),
        (["bash", "--login", "./scripts/train.sh"], ["bash", "--login", "./scripts/train.sh"]),
        (["bash", "--login", "scripts/train.sh"], ["bash", "--login", "scripts/train.sh"]),
        (["run", "-e", "HF_TOKEN=a b", "img"], ["run", "-e", "HF_TOKEN=***", "img"]),
        (["run", "--set-env", "A_PASSWORD=a"], ["run", "--set-env", "A_PASSWORD=***"]),
        (["t.py", '{"api_key":"a"}'], ["t.py", '{"api_key":***}']),
        (["t.py", "logger.api_key=a", "++a.b.token=a"], ["t.py", "logger.api_key=***", "++a.b.token=***"]),
        (["t.py", "--api_key", "-a", "--lr", "1"], ["t.py", "--api_key", "***", "--lr", "1"]),
        (["t.py", "--password=two words"], ["t.py", "--password=***"]),
        (["t.py", "--use-token", "-n", "1", "--token", "--lr", "1"], ["t.py", "--use-token", "-n", "1", "--token", "--lr", "1"]),
        (["t.py", "--db", "postgres://me:a/b@host/db"], ["t.py", "--db", "postgres://***@host/db"]),
        (["curl", "-H", "X-Api-Key: a", "-u", "me:a"], ["curl", "-H", "X-Api-Key: ***", "-u", "***"]),
        (["curl", "--user=me:a", "-ume:a"], ["curl", "--user=***", "-u***"]),
        (["curl", "-H", "Cookie: a=b; c=d"], ["curl", "-H", "Cookie: ***"]),
        (["bash", "-c", "PASSWORD='two words' x 1"], ["bash", "-c", "PASSWORD=*** x 1"]),
        (["bash", "-c", "PW='a'\\''b c' x 1"], ["bash", "-c", "PW=*** x 1"]),
        (["bash", "-c", 'PW="a \\" b" x 1'], ["bash", "-c", "PW=*** x 1"]),
        (["bash", "-c", "PW=a\\ b x 1"], ["bash", "-c", "PW=*** x 1"]),
        (["bash", "-c", 'bash -c "PW=\\"a b\\" x 1"'], ["bash", "-c", 'bash -c "PW=*** x 1"']),
        (["bash", "-c", "cat <<E\ntoken: a b\nlr: 1\nE"], ["bash", "-c", "cat <<E\ntoken: ***\nlr: 1\nE"]),
        (["bash", "-c", "x --token \\\n  'a b' --lr 1"], ["bash", "-c", "x --token \\\n  *** --lr 1"]),
        (["bash", "-c", "sshpass -p 'a b' ssh -p 22 h; mysql -pa d"], ["bash", "-c", "sshpass -p *** ssh -p 22 h; mysql -p*** d"]),
        (["sshpass", "-p", "a", "ssh", "-p", "22"], ["sshpass", "-p", "***", "ssh", "-p", "***"]),
        (["mysql", "-pa", "-p", "d"], ["mysql", "-p***", "-p", "d"]),
        (["bash", "-c", "PW=$(echo a b) x 1"], ["bash", "-c", "PW=*** x 1"]),
        (["srun", "--export=ALL,HF_TOKEN=a"], ["srun", "--export=ALL,HF_TOKEN=***"]),
        (["java", "-Dpassword=a"], ["java", "-Dpassword=***"]),
        (["docker", "login", "-p", "a"], ["docker", "login", "-p", "***"]),
        (["docker", "run", "-p", "80:80"], ["docker", "run", "-p", "80:80"]),
        (["python", "-c", "login(token='a b', lr=1)"], ["python", "-c", "login(token=***, lr=1)"]),
    ],
)  # fmt: skip
def test_what_is_masked_and_no_more(command, masked):
    assert mask_command(command) == masked


def test_a_command_line_of_megabytes_is_cut():
    masked = mask_command(["train.py", *["a=" * 1000] * 1000, "--token", "b"])
    assert len(masked) == 1003 and masked[-1] == "..."
    assert sum(map(len, masked)) < 2 * LONGEST_COMMAND


def test_text_without_secrets_is_unchanged():
    assert mask_text("backend='nccl' port 29500") == "backend='nccl' port 29500"


def test_environment_is_an_allow_list():
    environment = {
        "NCCL_DEBUG": "INFO",
        "RANK": "3",
        "OMP_NUM_THREADS": "4",
        "SLURM_JOB_ID": "17",
        "TORCH_HUB_TOKEN": "abcdef",
        "NCCL_PROXY": "http://me:abcdef@proxy",
        "TORCH_HOME": "https://host/path?X-Amz-Signature=abcdef&a=1",
        "GLOO_NOTE": "Authorization: Bearer abcdefgh",
        "WANDB_API_KEY": "abcdef",
        "AWS_SECRET_ACCESS_KEY": "abcdef",
        "HOME": "/root",
        "SLURM_JOB_USER": "me",
        "FI_KEY": "abcdef",
        "FI_PROVIDER": "efa",
        "FI_MR_KEY": "4",
    }
    recorded = recorded_environment(environment)
    assert recorded == {
        "FI_KEY": "***",
        "FI_MR_KEY": "4",
        "FI_PROVIDER": "efa",
        "NCCL_DEBUG": "INFO",
        "GLOO_NOTE": "Authorization: Bearer ***",
        "NCCL_PROXY": "http://***@proxy",
        "OMP_NUM_THREADS": "4",
        "RANK": "3",
        "SLURM_JOB_ID": "17",
        "TORCH_HOME": "https://host/path?X-Amz-Signature=***&a=1",
        "TORCH_HUB_TOKEN": "***",
    }


def test_no_file_of_a_run_holds_a_secret_of_its_surroundings(tmp_path):
    folder = tmp_path / "HF_TOKEN=hunter2"
    folder.mkdir()
    environment = clean_environment(
        NCCL_NET="api_key: hunter2", TORCH_AUTH="hunter2", WANDB_API_KEY="hunter2"
    )
    command = ["sh", "-c", "PW='a hunter2' python --password -hunter2; exit 0", '{"token":"hunter2"}']
    recorded = run_under(folder, command, environment=environment)
    written = {file.name: file.read_text() for file in recorded.run.rglob("*.json*")}
    assert not [name for name, text in written.items() if "hunter2" in text]
    manifest = json.loads(written["manifest.json"])
    assert manifest["cwd"].endswith("HF_TOKEN=***")
    assert manifest["command"] == ["sh", "-c", "PW=*** python --password ***; exit 0", '{"token":***}']


def test_the_commit_that_a_build_system_tells_is_no_secret():
    commit = "3f786850e387550fdab836ed7e6dc881de23001b"
    assert recorded_environment({"GITHUB_SHA": commit, "GIT_COMMIT": "3f78685"}) == {
        "GITHUB_SHA": commit,
        "GIT_COMMIT": "3f78685",
    }
    assert (
        recorded_environment({"GIT_COMMIT": "AKIAIOSFODNN7EXAMPLE"})["GIT_COMMIT"] != "AKIAIOSFODNN7EXAMPLE"
    )
