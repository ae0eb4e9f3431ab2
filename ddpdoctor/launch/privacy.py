"""What of the job's surroundings may be written down: an allow-list of the environment, and a command line
without secrets.

A run directory and its report go into tickets, so the rule is to mask too much rather than too little.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise

MASK = "***"

_ALLOWED_PREFIXES = (
    *(
        "NCCL_",
        "TORCH_",
        "TORCHELASTIC_",
        "PYTORCH_",
        "GLOO_",
        "UCX_",
        "FI_",
        "RCCL_",
        "ROCR_",
        "CUDA_DEVICE_",
    ),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "OMPI_COMM_WORLD_", "PMI_"),
)
_ALLOWED_NAMES = frozenset(
    [
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "ROLE_RANK"),
        *("ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "HIP_VISIBLE_DEVICES"),
        *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NODEID"),
        *(
            "SLURM_NNODES",
            "SLURM_JOB_NUM_NODES",
            "SLURM_NODELIST",
            "SLURM_JOB_NODELIST",
            "SLURM_STEP_NODELIST",
        ),
        *("SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "SLURM_RESTART_COUNT"),
    ]
)

_SECRET_WORDS = frozenset(
    [
        *(
            "token",
            "secret",
            "password",
            "passwd",
            "passphrase",
            "pass",
            "pwd",
            "pw",
            "credential",
            "credentials",
        ),
        *("apikey", "accesskey", "secretkey", "privatekey", "auth", "authorization", "bearer", "cookie"),
    ]
)
_KEY_WORDS = frozenset(
    ["api", "access", "private", "secret", "auth", "account", "encryption", "wandb", "license"]
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ASSIGNMENT = re.compile(r"([\w.+-]*[A-Za-z][\w.+-]*)=(.+)", re.DOTALL)

_KNOWN_SECRETS = re.compile(
    r"hf_[A-Za-z0-9]{8,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|(?:AKIA|ASIA)[0-9A-Z]{12,}"
    r"|sk-[\w-]{16,}|xox[abeprs]-[\w-]{8,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|pypi-[\w-]{16,}|npm_[A-Za-z0-9]{20,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?|-----BEGIN [A-Z ]*PRIVATE KEY-----.*",
    re.DOTALL,
)
_USER_IN_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^/\s@]+@")
_QUERY_SECRET = re.compile(
    r"([?&;](?:[\w.-]*(?:token|key|secret|password|signature|credential)[\w.-]*|sig)=)[^&;\s#]+",
    re.IGNORECASE,
)
_AUTHORIZATION = re.compile(r"\b(bearer|basic|token)\s+[\w.+/=~-]{6,}", re.IGNORECASE)
_SEGMENT = re.compile(r"[A-Za-z0-9+]{20,}={0,2}")


def recorded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that say how a job is set up (rank, threads, NCCL, scheduler's ids), secrets in them
    masked.
    """
    return {
        name: MASK if _names_secret(name) else mask_text(value)
        for name, value in sorted(environment.items())
        if name in _ALLOWED_NAMES or name.startswith(_ALLOWED_PREFIXES)
    }


def mask_command(command: Iterable[str]) -> list[str]:
    """The command line with passwords, tokens and what looks like one replaced by ``***``; as many arguments
    as before.
    """
    masked: list[str] = []
    value_is_secret = False
    for argument in command:
        if value_is_secret and not argument.startswith("-"):
            masked.append(MASK)
            value_is_secret = False
            continue
        value_is_secret = argument.startswith("-") and "=" not in argument and _names_secret(argument)
        masked.append(_mask_argument(argument))
    return masked


def mask_text(text: str) -> str:
    """``text`` with every known form of a token, credentials in URLs and long random strings replaced by
    ``***``.
    """
    text = _KNOWN_SECRETS.sub(MASK, text)
    text = _USER_IN_URL.sub(rf"\g<1>{MASK}@", text)
    text = _QUERY_SECRET.sub(rf"\g<1>{MASK}", text)
    text = _AUTHORIZATION.sub(rf"\g<1> {MASK}", text)
    return _SEGMENT.sub(lambda found: MASK if _is_random(found.group()) else found.group(), text)


def _mask_argument(argument: str) -> str:
    if any(space in argument for space in " \t\n"):
        # A command line within an argument: sh -c "export TOKEN=... ; python train.py --api-key ..."
        text = mask_text(argument)
        parts = re.split(r"(\s+)", text)
        parts[::2] = mask_command(parts[::2])
        return "".join(parts)
    assigned = _ASSIGNMENT.fullmatch(argument)
    if assigned and _names_secret(assigned.group(1)):
        return f"{assigned.group(1)}={MASK}"
    return mask_text(argument)


def _names_secret(name: str) -> bool:
    """Whether an option or variable of this name holds a secret: its last word decides (``--max-tokens`` does
    not).
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return False
    if words[-1] in ("key", "keys", "id"):
        return words[-1] != "id" and len(words) > 1 and words[-2] in _KEY_WORDS
    return words[-1] in _SECRET_WORDS


def _is_random(segment: str) -> bool:
    """Whether a run of letters and digits is more like a key than like words: kinds alternate, and its
    entropy is high.

    3 bits a character is what 32 random hexadecimal digits hardly ever fall below, and prose without digits
    is left alone.
    """
    kinds = ["digit" if char.isdigit() else "letter" for char in segment if char.isalnum()]
    changes = sum(left != right for left, right in pairwise(kinds))
    if changes < 3:
        return False
    counts = Counter(segment)
    entropy_bits = -sum(n / len(segment) * math.log2(n / len(segment)) for n in counts.values())
    return entropy_bits >= 3.0
