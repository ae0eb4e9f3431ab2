"""What of the job's surroundings may be written down: an allow-list of the environment, and text without secrets.

A run directory and its report go into tickets, so the rule is to mask too much rather than too little.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import groupby
from typing import Mapping

MASK = "***"

_ALLOWED = re.compile(
    r"(NCCL|GLOO|TORCH|TORCHELASTIC|PYTORCH|UCX|FI|RCCL|ROCR|HIP|CUDA|CUDNN|CUBLAS|OMP|MKL|KMP|GOMP|OPENBLAS"
    r"|OMPI_COMM_WORLD|PMI)_\w+"
    r"|SLURM_(JOB_ID|STEP_ID|PROCID|LOCALID|NODEID|NTASKS|NTASKS_PER_NODE|NNODES|JOB_NUM_NODES|NODELIST|JOB_NODELIST"
    r"|STEP_NODELIST|CPUS_PER_TASK|GPUS_ON_NODE|RESTART_COUNT)"
    r"|RANK|LOCAL_RANK|NODE_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|ROLE_WORLD_SIZE"
    r"|MASTER_ADDR|MASTER_PORT|MALLOC_CONF|LD_PRELOAD|PMIX_NAMESPACE|PMIX_RANK|MPI_LOCALRANKID|MPI_LOCALNRANKS"
)
"""Whole names of the variables that are recorded."""

_SECRET_WORD = re.compile(
    "token|secret|password|passwd|passphrase|pass|pwd|pw|credential|credentials|apikey|accesskey|secretkey|privatekey"
    "|auth|authorization|bearer|cookie"
)
_KEY_WORD = re.compile("api|access|private|secret|auth|account|encryption|wandb|license")
"""Before "key"."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

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
        name: MASK if names_secret(name) else mask_text(value)
        for name, value in sorted(environment.items())
        if _ALLOWED.fullmatch(name)
    }


def mask_text(text: str) -> str:
    """``text`` with every known form of a token, credentials in URLs and long random strings replaced by
    ``***``.
    """
    text = _KNOWN_SECRETS.sub(MASK, text)
    text = _USER_IN_URL.sub(rf"\g<1>{MASK}@", text)
    text = _QUERY_SECRET.sub(rf"\g<1>{MASK}", text)
    text = _AUTHORIZATION.sub(rf"\g<1> {MASK}", text)
    return _SEGMENT.sub(lambda found: MASK if _is_random(found.group()) else found.group(), text)


def names_secret(name: str) -> bool:
    """Whether an option or variable of this name holds a secret: its last word decides (``--max-tokens`` does
    not).
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if not words:
        return False
    if words[-1] in ("key", "keys", "id"):
        return words[-1] != "id" and len(words) > 1 and _KEY_WORD.fullmatch(words[-2]) is not None
    return _SECRET_WORD.fullmatch(words[-1]) is not None


def _is_random(segment: str) -> bool:
    """Whether a run of letters and digits is more like a key than like words: kinds alternate, and its
    entropy is high.

    3 bits a character is what 32 random hexadecimal digits hardly ever fall below, and prose without digits
    is left alone.
    """
    kinds = groupby(char.isdigit() for char in segment if char.isalnum())
    changes = sum(1 for _ in kinds) - 1
    if changes < 3:
        return False
    counts = Counter(segment)
    entropy_bits = -sum(n / len(segment) * math.log2(n / len(segment)) for n in counts.values())
    return entropy_bits >= 3.0
