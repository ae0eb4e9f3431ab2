"""Masks secrets in what is recorded: an allow-list of environment variables, and masked text and command lines.

Tokens are recognized without context, most by the prefix of their service. In URLs, credentials before the host are masked, and
the paths of webhooks, which are secret as a whole. The forms are from the services' documentation and gitleaks' rules
(https://github.com/gitleaks/gitleaks, MIT), without token lengths if a prefix suffices, because services change them. Each form fails
within a bounded number of characters or starts only at the beginning of a word, so a text is read in linear time.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import PurePath

from . import secretnames

_FORMS = (
    # Models and experiments: Hugging Face, OpenAI, Anthropic and others after sk-, W&B, Replicate, Groq, xAI, NVIDIA, ...
    r"hf_[A-Za-z0-9]{8,}|api_org_[A-Za-z0-9]{20,}",
    r"sk-(?:ant|proj|svcacct|admin|or|lf)-[\w-]{8,}|sk-[A-Za-z0-9]{20,}|sk_[0-9a-f]{32,}",
    r"wandb_v\d+_\w{16,}|r8_[A-Za-z0-9]{20,}|gsk_[A-Za-z0-9]{20,}|xai-[A-Za-z0-9]{20,}|pplx-[A-Za-z0-9]{20,}",
    r"nvapi-[\w-]{16,}|fw_[A-Za-z0-9]{20,}|rpa_[A-Z0-9]{20,}|tvly-[\w-]{16,}|lsv2_(?:pt|sk)_\w{16,}|KGAT_\w{16,}",
    # Code hosts and package registries.
    r"gh[pousr]_\w{16,}|github_pat_\w{16,}|GR1348941[\w-]{16,}|npm_[A-Za-z0-9]{20,}|pypi-AgE[\w-]{16,}|dckr_pat_[\w-]{16,}",
    r"gl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas|ffct|wt|rtr)-[\w.-]{16,}|ATATT3[\w=-]{16,}|ATBB[A-Za-z0-9]{24,}",
    # Clouds, storage and secret managers.
    r"(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{12,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|GOCSPX-[\w-]{16,}|1//0[\w-]{20,}",
    r"[\w.~-]{3}\dQ~[\w.~-]{20,}|dapi[0-9a-f]{16,}(?:-\d+)?|do[por]_v1_[0-9a-f]{16,}|hv[sbr]\.[\w-]{16,}",
    r"[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{16,}|dp\.(?:pt|st|ct|sa|scim|audit)\.[\w.-]{16,}|pul-[0-9a-f]{32,}",
    r"pscale_(?:tkn|pw|oauth)_[\w.=-]{16,}|sbp_[0-9a-f]{32,}|glsa_\w{20,}|glc_[A-Za-z0-9+/=]{20,}|NRAK-[A-Z0-9]{20,}",
    # Messages, mail, payments.
    r"xox[abeoprs]-[\w-]{8,}|xapp-\d-[\w-]{8,}|\d{8,10}:A[\w-]{30,}|bot\d{8,10}:A[\w-]{30,}",
    r"[MNO][\w-]{22,27}\.[\w-]{6}\.[\w-]{25,}|mfa\.[\w-]{20,}|(?:SK|AC)[0-9a-f]{32}|SG\.[\w-]{16,}\.[\w-]{16,}",
    r"(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{10,}|whsec_[A-Za-z0-9+/=]{16,}|key-[0-9a-f]{32}|[0-9a-f]{32}-us\d{1,2}",
    r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}|sq0(?:atp|csp|idp)-[\w-]{16,}|lin_api_\w{16,}|ntn_\w{20,}|secret_[A-Za-z0-9]{40,}",
    # Base64 of a text that begins with '{"': JSON Web Tokens, service accounts, registry logins.
    r"eyJ[\w+/=-]{12,}(?:\.[\w=-]*){0,4}",
    r"AGE-SECRET-KEY-1[0-9A-Z]{20,}",
)
_BEFORE = r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{2})|(?<=\\[nrt]))"
"""A token starts at a word boundary or after an escape sequence: "mask-rcnn-..." contains no key of OpenAI."""

_ANYWHERE = r"hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
"""Forms that cannot be part of a word are recognized within words, too."""

KNOWN_FORMS = re.compile(f"{_BEFORE}(?:{'|'.join(_FORMS)})|{_ANYWHERE}")

PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]{0,40}-----|\Z)", re.DOTALL
)
"""PEM, OpenSSH and PGP; up to the end of the text if the key has no end line."""

_CREDENTIAL = r"[\w.+/=~-]"
SCHEME_WORD = re.compile(
    rf"(?<![\w.-])((?i:bearer)[ \t]{{1,8}}){_CREDENTIAL}{{6,}}"
    r"|(?<![\w.-])((?i:basic|token|digest|negotiate|apikey)[ \t]{1,8})"
    rf"(?![A-Za-z][a-z]*(?:[-./][a-z]+)*[.-]?(?!{_CREDENTIAL})){_CREDENTIAL}{{6,}}"
)
"""Text after the name of an HTTP authentication scheme; not prose such as "basic training" and "unexpected token import"."""

NETRC = re.compile(r"(\blogin[ \t\n]{1,8}[^\s]{1,256}[ \t\n]{1,8}password[ \t\n]{1,8})[^\s]+")

LONG_RUN = re.compile(r"%[0-9A-Fa-f]{2}|\\[nrt]|[A-Za-z0-9+/_-]{20,}={0,2}")
"""Candidates for ``random_parts_masked``. An escape sequence before a candidate is not part of it."""
_PART = re.compile(r"[A-Za-z0-9+]{20,}={0,2}")
_MIXED_PART = re.compile(r"[A-Za-z0-9_+-]{24,}={0,2}")
_AWS_SECRET_LETTERS = 40
_MIXED_SHARE = 0.42
"""Minimum share of neighbouring characters of different kind (lower case, upper case, digit). It is 0.61 in random base 62, 0.1 to
0.3 in words."""
_MOST_SEPARATORS = 0.1
"""Maximum share of separators: 1/32 in random base 64, 1/5 in Qwen2-VL-7B-Instruct-AWQ."""


_COMMIT = re.compile(r"[0-9a-f]{40}")


def random_parts_masked(found: re.Match[str]) -> str:
    """A match of ``LONG_RUN``, with the parts that resemble keys rather than words masked."""
    run = found.group()
    if _COMMIT.fullmatch(run) and found.string[found.start() - 1 : found.start()] == "@":
        return run  # repository@commit
    if len(run) == _AWS_SECRET_LETTERS and _is_mixed(run):
        return MASK
    run = _MIXED_PART.sub(lambda part: MASK if _is_mixed(part.group()) else part.group(), run)
    return _PART.sub(lambda part: MASK if _is_random(part.group()) else part.group(), run)


def _kind(letter: str) -> int:
    return 0 if letter.isdigit() else 1 if letter.islower() else 2 if letter.isupper() else 3


def _is_mixed(part: str) -> bool:
    """Whether lower case, upper case and digits alternate as in random base 64."""
    kinds = [_kind(letter) for letter in part]
    changes = sum(kinds[at] != kinds[at - 1] for at in range(1, len(kinds)))
    words = kinds.count(3) > _MOST_SEPARATORS * len(part)
    return {0, 1, 2} <= set(kinds) and not words and changes >= _MIXED_SHARE * len(part)


def _is_random(part: str) -> bool:
    """Whether a run of letters and digits resembles a key rather than words: letters and digits alternate, and its entropy is high.
    32 random hexadecimal digits have hardly ever less than 3 bits per character. Prose without digits is not masked."""
    kinds = groupby(char.isdigit() for char in part if char.isalnum())
    changes = sum(1 for _ in kinds) - 1
    if changes < 3:
        return False
    counts = Counter(part)
    entropy_bits = -sum(n / len(part) * math.log2(n / len(part)) for n in counts.values())
    return entropy_bits >= 3.0


_AFTER_SCHEME = re.compile(r"""://([^\s"'`<>|]+)""")
"""Starts at the fixed part, because the scheme before it may have any length."""
_WITHOUT_SCHEME = re.compile(r"""(?<![\w./:@+-])([\w.-]{1,64}:)[^\s@/"'`<>:=]{1,256}@(?=\w)(?!sha256)""")
"""``user:password@host``, as accepted by database drivers and rsync."""
_WEBHOOK = re.compile(r"(?i:(?:^|/)hooks?\.[^/]+/|/(?:web)?hooks?(?:b2)?/|^maker\.ifttt\.com/)")
"""Slack, Discord, Teams, Mattermost, Zapier, GitLab and others with such paths."""
_CONTAINER_BEFORE_AT = ("abfs", "abfss", "wasb", "wasbs")
"""Azure schemes in which a container name precedes the ``@``."""


def mask_urls(text: str) -> str:
    """``text`` with users and passwords in URLs, and the paths of webhooks, masked."""

    def replace(found: re.Match[str]) -> str:
        scheme = text[max(0, found.start() - 8) : found.start()].lower()
        return "://" + _mask_rest(found[1], scheme.endswith(_CONTAINER_BEFORE_AT))

    text = _AFTER_SCHEME.sub(replace, text)
    return _WITHOUT_SCHEME.sub(rf"\g<1>{MASK}@", text)


def _mask_rest(rest: str, names_container: bool) -> str:
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    # A password may contain a slash or an @; the host then follows the last @. A digest is not a host.
    last = rest.rfind("@") if ":" in authority else -1
    at = authority.rfind("@") if rest.startswith("sha256:", last + 1) else max(authority.rfind("@"), last)
    if at >= 0 and not (names_container and ":" not in authority[:at]):
        rest = f"{MASK}@{rest[at + 1 :]}"
    hook = _WEBHOOK.search(rest)
    return rest[: hook.end()] + MASK if hook else rest


MASK = "***"
LONGEST_TEXT = 16_384
"""Upper limit of the characters kept of one argument, variable or message. Masking that many takes milliseconds."""
_LAST_WORD = 1024
"""Characters before a cut in which the start of the last word is searched, because half a token is not recognized."""

_ALLOWED = re.compile(
    r"(NCCL|GLOO|TORCH|TORCHELASTIC|PYTORCH|UCX|FI|RCCL|ROCR|HIP|CUDA|CUDNN|CUBLAS|OMP|MKL|KMP|GOMP|OPENBLAS"
    r"|OMPI_COMM_WORLD|PMI)_\w+"
    r"|SLURM_(JOB_ID|STEP_ID|PROCID|LOCALID|NODEID|NTASKS|NTASKS_PER_NODE|NNODES|JOB_NUM_NODES|NODELIST|JOB_NODELIST"
    r"|STEP_NODELIST|CPUS_PER_TASK|GPUS_ON_NODE|RESTART_COUNT)"
    r"|RANK|LOCAL_RANK|NODE_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|ROLE_WORLD_SIZE"
    r"|GITHUB_SHA|CI_COMMIT_SHA|GIT_COMMIT|BUILDKITE_COMMIT|CIRCLE_SHA1|BITBUCKET_COMMIT"
    r"|MASTER_ADDR|MASTER_PORT|MALLOC_CONF|LD_PRELOAD|PMIX_NAMESPACE|PMIX_RANK|MPI_LOCALRANKID|MPI_LOCALNRANKS"
)
"""Full names of the recorded variables."""
_HARMLESS = re.compile(r"[A-Za-z0-9_.,-]{0,10}")
"""Values too short for a known token and without a name; most environment variables."""


def recorded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that describe the job's setup (rank, threads, NCCL, scheduler ids), with secrets masked."""
    return {
        name: MASK
        if secretnames.names_secret(name)
        else value
        if secretnames.is_hash(name, value)
        else mask_text(value)
        for name, value in sorted(environment.items())
        if _ALLOWED.fullmatch(name)
    }


def mask_text(text: str) -> str:
    """Mask the values of secrets, known forms of tokens, credentials in URLs and long random strings by ``***``. Text beyond
    ``LONGEST_TEXT`` is cut, with a mark."""
    if _HARMLESS.fullmatch(text):
        return text
    kept, cut = _cut(text)
    kept = mask_urls(PRIVATE_KEY.sub(MASK, kept))
    kept = NETRC.sub(rf"\g<1>{MASK}", kept)
    for begin, end in reversed(list(secretnames.program_secrets(kept))):
        kept = kept[:begin] + MASK + kept[end:]
    done, position = [], 0
    for begin, end, secret in secretnames.secret_values(kept):
        done += [_without_tokens(kept[position:begin]), MASK if secret else kept[begin:end]]
        position = end
    return "".join([*done, _without_tokens(kept[position:]), cut])


def _cut(text: str) -> tuple[str, str]:
    """The kept part of a text, and a mark with the number of characters cut."""
    if len(text) <= LONGEST_TEXT:
        return text, ""
    words = re.split(r"[\s\"'&,;]", text[LONGEST_TEXT - _LAST_WORD : LONGEST_TEXT])
    kept = text[: LONGEST_TEXT - (len(words[-1]) if len(words) > 1 else _LAST_WORD)]
    return kept, f"... ({len(text) - len(kept)} more letters)"


def _without_tokens(text: str) -> str:
    text = KNOWN_FORMS.sub(MASK, text)
    text = SCHEME_WORD.sub(lambda found: (found[1] or found[2]) + MASK, text)
    return LONG_RUN.sub(random_parts_masked, text)


LEFT_OUT = "..."
"""Replaces each argument beyond ``LONGEST_COMMAND``."""
LONGEST_COMMAND = 16 * LONGEST_TEXT
"""Upper limit of the characters kept of a command line; a list of ten thousand files is of no use to a reader."""
_ASSIGNED = re.compile(r"([\w.+~-]*\w)(=)")
_SETTING = re.compile(r"[A-Za-z]\w*[._]\w[\w.]*")
"""A name whose value is the next word: ``WANDB.API_KEY X`` (yacs), ``aws configure set aws_secret_access_key X``."""
_OPTION_OF_TEXT = re.compile(r"-\w*c")
"""The argument after ``sh -c`` or ``python -c`` is a program, not a value."""
_INSIDE_PROGRAM = 64
"""Number of words after a program's name in which its short option is searched."""


def mask_command(command: Iterable[str]) -> list[str]:
    """The command line with passwords, tokens and text resembling them replaced by ``***``. The number of arguments does not
    change."""
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
        and secretnames.names_secret(before)
        and secretnames.holds_value(before, argument)
    ):
        return argument if secretnames.is_no_secret(argument) else MASK
    if _SETTING.fullmatch(before) and secretnames.names_secret(before) and not argument.startswith("-"):
        return argument if secretnames.is_no_secret(argument) else MASK
    if before.startswith("-") and secretnames.is_hash(before, argument):
        return argument
    if _OPTION_OF_TEXT.fullmatch(before):
        return mask_text(argument)
    # The whole rest of an argument is the value, even after a space: --env=PASSWORD=two words
    position = 0
    while assigned := _ASSIGNED.match(argument, position):
        position = assigned.end()
        if secretnames.names_secret(assigned[1]):
            value = argument[position:]
            return argument if secretnames.is_no_secret(value) else mask_text(argument[:position]) + MASK
    return mask_text(argument)


class _ShortOptions:
    """Masks the password options of the program whose arguments are being read."""

    def __init__(self) -> None:
        self._program, self._left, self._is_next, self._words = "", 0, False, ("", "")

    def masked(self, argument: str) -> str | None:
        """The masked ``argument``; None if it is no such option."""
        if self._is_next:
            self._is_next = False
            return MASK
        self._words = (self._words[1], PurePath(argument[:LONGEST_TEXT]).name)
        for program in (self._words[1], " ".join(self._words)):
            if program in secretnames.SHORT_OPTIONS:
                self._program, self._left = program, _INSIDE_PROGRAM
                return None
        self._left -= 1
        if self._left < 0:
            return None
        for option in secretnames.SHORT_OPTIONS[self._program]:
            if argument == option:
                self._is_next = self._program not in secretnames.ATTACHED_ONLY
                return argument
            if argument.startswith(option) and not option.startswith("--"):
                return option + MASK
            if argument.startswith(f"{option}="):
                return f"{option}={MASK}"
        return None
