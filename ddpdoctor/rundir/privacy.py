"""What of the job's environment may be written: an allow-list of variables, and text and command lines without
secrets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath

from .named import is_hash, program_secrets, secret_values
from .secretnames import ATTACHED_ONLY, SHORT_OPTIONS, holds_value, is_no_secret, names_secret
from .tokens import KNOWN_FORMS, LONG_RUN, NETRC, PRIVATE_KEY, SCHEME_WORD, mask_urls, random_parts_masked

MASK = "***"
LONGEST_TEXT = 16_384
"""Letters of one argument, variable or message that are kept; masking this many takes milliseconds."""
_LAST_WORD = 1024
"""Letters at a cut in which the end of a word is looked for: half a token is not known as one."""

_ALLOWED = re.compile(
    r"(NCCL|GLOO|TORCH|TORCHELASTIC|PYTORCH|UCX|FI|RCCL|ROCR|HIP|CUDA|CUDNN|CUBLAS|OMP|MKL|KMP|GOMP|OPENBLAS"
    r"|OMPI_COMM_WORLD|PMI)_\w+"
    r"|SLURM_(JOB_ID|STEP_ID|PROCID|LOCALID|NODEID|NTASKS|NTASKS_PER_NODE|NNODES|JOB_NUM_NODES|NODELIST|JOB_NODELIST"
    r"|STEP_NODELIST|CPUS_PER_TASK|GPUS_ON_NODE|RESTART_COUNT)"
    r"|RANK|LOCAL_RANK|NODE_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|ROLE_WORLD_SIZE"
    r"|GITHUB_SHA|CI_COMMIT_SHA|GIT_COMMIT|BUILDKITE_COMMIT|CIRCLE_SHA1|BITBUCKET_COMMIT"
    r"|MASTER_ADDR|MASTER_PORT|MALLOC_CONF|LD_PRELOAD|PMIX_NAMESPACE|PMIX_RANK|MPI_LOCALRANKID|MPI_LOCALNRANKS"
)
"""Whole names of the variables that are recorded."""
_HARMLESS = re.compile(r"[A-Za-z0-9_.,-]{0,10}")
"""Too short for a known token, and without a name: most values of the environment."""


def recorded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that say how a job is set up (rank, threads, NCCL, scheduler's ids), secrets in them
    masked.
    """
    return {
        name: MASK if names_secret(name) else value if is_hash(name, value) else mask_text(value)
        for name, value in sorted(environment.items())
        if _ALLOWED.fullmatch(name)
    }


def mask_text(text: str) -> str:
    """``text`` with the values of secrets, every known form of a token, credentials in URLs and long random strings
    replaced by ``***``; what is longer than ``LONGEST_TEXT`` is cut, with a mark.
    """
    if _HARMLESS.fullmatch(text):
        return text
    kept, cut = _cut(text)
    kept = mask_urls(PRIVATE_KEY.sub(MASK, kept), MASK)
    kept = NETRC.sub(rf"\g<1>{MASK}", kept)
    for begin, end in reversed(list(program_secrets(kept))):
        kept = kept[:begin] + MASK + kept[end:]
    done, position = [], 0
    for begin, end, secret in secret_values(kept):
        done += [_without_tokens(kept[position:begin]), MASK if secret else kept[begin:end]]
        position = end
    return "".join([*done, _without_tokens(kept[position:]), cut])


def _cut(text: str) -> tuple[str, str]:
    """What is kept of a text, and the mark that says how much is not."""
    if len(text) <= LONGEST_TEXT:
        return text, ""
    words = re.split(r"[\s\"'&,;]", text[LONGEST_TEXT - _LAST_WORD : LONGEST_TEXT])
    kept = text[: LONGEST_TEXT - (len(words[-1]) if len(words) > 1 else _LAST_WORD)]
    return kept, f"... ({len(text) - len(kept)} more letters)"


def _without_tokens(text: str) -> str:
    text = KNOWN_FORMS.sub(MASK, text)
    text = SCHEME_WORD.sub(lambda found: (found[1] or found[2]) + MASK, text)
    return LONG_RUN.sub(lambda found: random_parts_masked(found, MASK), text)


LEFT_OUT = "..."
"""Stands for each argument beyond ``LONGEST_COMMAND``."""
LONGEST_COMMAND = 16 * LONGEST_TEXT
"""Letters of a command line that are kept: a list of ten thousand files is of no use to a reader."""
_ASSIGNED = re.compile(r"([\w.+~-]*\w)(=)")
_SETTING = re.compile(r"[A-Za-z]\w*[._]\w[\w.]*")
"""A name whose value is the next word: ``WANDB.API_KEY X`` of yacs, ``aws configure set aws_secret_access_key X``."""
_OPTION_OF_TEXT = re.compile(r"-\w*c")
"""What follows ``sh -c`` and ``python -c`` is a program, not a value."""
_INSIDE_PROGRAM = 64
"""Words after a program's name in which its short option is looked for."""


def mask_command(command: Iterable[str]) -> list[str]:
    """The command line with passwords, tokens and what looks like one replaced by ``***``; as many arguments
    as before.
    """
    masked: list[str] = []
    before = ""
    left = LONGEST_COMMAND
    short = _ShortOptions()
    for argument in command:
        left -= min(len(argument), LONGEST_TEXT)
        if left < 0:
            masked.append(LEFT_OUT)
        else:
            masked.append(short.masked(argument) or _mask_argument(argument, before))
        before = argument
    return masked


def _mask_argument(argument: str, before: str) -> str:
    if (
        before.startswith("-")
        and "=" not in before
        and names_secret(before)
        and holds_value(before, argument)
    ):
        return argument if is_no_secret(argument) else MASK
    if _SETTING.fullmatch(before) and names_secret(before) and not argument.startswith("-"):
        return argument if is_no_secret(argument) else MASK
    if before.startswith("-") and is_hash(before, argument):
        return argument
    if _OPTION_OF_TEXT.fullmatch(before):
        return mask_text(argument)
    # All of an argument is the value, also what stands after a space: --env=PASSWORD=two words
    position = 0
    while assigned := _ASSIGNED.match(argument, position):
        position = assigned.end()
        if names_secret(assigned[1]):
            value = argument[position:]
            return argument if is_no_secret(value) else mask_text(argument[:position]) + MASK
    return mask_text(argument)


class _ShortOptions:
    """The short options with a password of the program whose arguments are being read."""

    def __init__(self) -> None:
        self._program, self._left, self._is_next, self._words = "", 0, False, ("", "")

    def masked(self, argument: str) -> str | None:
        """``argument`` masked, None where it is none of these."""
        if self._is_next:
            self._is_next = False
            return MASK
        self._words = (self._words[1], PurePath(argument[:LONGEST_TEXT]).name)
        for program in (self._words[1], " ".join(self._words)):
            if program in SHORT_OPTIONS:
                self._program, self._left = program, _INSIDE_PROGRAM
                return None
        self._left -= 1
        if self._left < 0:
            return None
        for option in SHORT_OPTIONS[self._program]:
            if argument == option:
                self._is_next = self._program not in ATTACHED_ONLY
                return argument
            if argument.startswith(option) and not option.startswith("--"):
                return option + MASK
            if argument.startswith(f"{option}="):
                return f"{option}={MASK}"
        return None
