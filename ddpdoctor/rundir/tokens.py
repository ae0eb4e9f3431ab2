"""Forms of tokens that can be recognised without their context, most by a prefix of their service, and credentials
in URLs: before the host, and webhooks, which are secrets as a whole.

From the services' own pages and gitleaks' rules (https://github.com/gitleaks/gitleaks, MIT), without their lengths
where a prefix suffices: a service may lengthen its tokens. Each form fails, where it does, within a bounded number of
letters or begins only where a word begins, so that a text is read in linear time.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import groupby

_FORMS = (
    # Models and experiments: Hugging Face, OpenAI, Anthropic and others after sk-, W&B, Replicate, Groq, xAI, NVIDIA, ...
    r"hf_[A-Za-z0-9]{8,}|api_org_[A-Za-z0-9]{20,}",
    r"sk-(?:ant|proj|svcacct|admin|or|lf)-[\w-]{8,}|sk-[A-Za-z0-9]{20,}|sk_[0-9a-f]{32,}",
    r"wandb_v\d+_\w{16,}|r8_[A-Za-z0-9]{20,}|gsk_[A-Za-z0-9]{20,}|xai-[A-Za-z0-9]{20,}|pplx-[A-Za-z0-9]{20,}",
    r"nvapi-[\w-]{16,}|fw_[A-Za-z0-9]{20,}|rpa_[A-Z0-9]{20,}|tvly-[\w-]{16,}|lsv2_(?:pt|sk)_\w{16,}|KGAT_\w{16,}",
    # Code hosts and package registries.
    r"gh[pousr]_\w{16,}|github_pat_\w{16,}|GR1348941[\w-]{16,}|npm_[A-Za-z0-9]{20,}|pypi-AgE[\w-]{16,}|dckr_pat_[\w-]{16,}",
    r"gl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas|ffct|wt|rtr)-[\w.-]{16,}|ATATT3[\w=-]{16,}|ATBB[A-Za-z0-9]{24,}",
    # Clouds, stores and secret keepers.
    r"(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{12,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|GOCSPX-[\w-]{16,}|1//0[\w-]{20,}",
    r"[\w.~-]{3}\dQ~[\w.~-]{20,}|dapi[0-9a-f]{16,}(?:-\d+)?|do[por]_v1_[0-9a-f]{16,}|hv[sbr]\.[\w-]{16,}",
    r"[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{16,}|dp\.(?:pt|st|ct|sa|scim|audit)\.[\w.-]{16,}|pul-[0-9a-f]{32,}",
    r"pscale_(?:tkn|pw|oauth)_[\w.=-]{16,}|sbp_[0-9a-f]{32,}|glsa_\w{20,}|glc_[A-Za-z0-9+/=]{20,}|NRAK-[A-Z0-9]{20,}",
    # Messages, mail, payments.
    r"xox[abeoprs]-[\w-]{8,}|xapp-\d-[\w-]{8,}|\d{8,10}:A[\w-]{30,}|bot\d{8,10}:A[\w-]{30,}",
    r"[MNO][\w-]{22,27}\.[\w-]{6}\.[\w-]{25,}|mfa\.[\w-]{20,}|(?:SK|AC)[0-9a-f]{32}|SG\.[\w-]{16,}\.[\w-]{16,}",
    r"(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{10,}|whsec_[A-Za-z0-9+/=]{16,}|key-[0-9a-f]{32}|[0-9a-f]{32}-us\d{1,2}",
    r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}|sq0(?:atp|csp|idp)-[\w-]{16,}|lin_api_\w{16,}|ntn_\w{20,}|secret_[A-Za-z0-9]{40,}",
    # What begins with '{"' in base64: JSON Web Tokens, service accounts, logins of registries.
    r"eyJ[\w+/=-]{12,}(?:\.[\w=-]*){0,4}",
    r"AGE-SECRET-KEY-1[0-9A-Z]{20,}",
)
_BEFORE = r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{2})|(?<=\\[nrt]))"
"""A token is a word of its own, also where an escape stands before it: "mask-rcnn-..." holds no key of OpenAI."""

_ANYWHERE = r"hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|(?:AKIA|ASIA)[0-9A-Z]{16}"
"""What cannot be part of a word is known there too."""

KNOWN_FORMS = re.compile(f"{_BEFORE}(?:{'|'.join(_FORMS)})|{_ANYWHERE}")

PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]{0,40}-----|\Z)", re.DOTALL
)
"""PEM, OpenSSH and PGP, to the end of the text where the key has none."""

_CREDENTIAL = r"[\w.+/=~-]"
SCHEME_WORD = re.compile(
    rf"(?<![\w.-])((?i:bearer)[ \t]{{1,8}}){_CREDENTIAL}{{6,}}"
    r"|(?<![\w.-])((?i:basic|token|digest|negotiate|apikey)[ \t]{1,8})"
    rf"(?![A-Za-z][a-z]*(?:[-./][a-z]+)*[.-]?(?!{_CREDENTIAL})){_CREDENTIAL}{{6,}}"
)
"""What follows the name of an HTTP authentication scheme; "basic training" and "unexpected token import" are prose."""

NETRC = re.compile(r"(\blogin[ \t\n]{1,8}[^\s]{1,256}[ \t\n]{1,8}password[ \t\n]{1,8})[^\s]+")

LONG_RUN = re.compile(r"%[0-9A-Fa-f]{2}|\\[nrt]|[A-Za-z0-9+/_-]{20,}={0,2}")
"""What random_parts_masked looks at; an escape before a run is none of its letters."""
_PART = re.compile(r"[A-Za-z0-9+]{20,}={0,2}")
_MIXED_PART = re.compile(r"[A-Za-z0-9_+-]{24,}={0,2}")
_AWS_SECRET_LETTERS = 40
_MIXED_SHARE = 0.42
"""Random letters of base 62 change their kind (small, capital, digit) at 0.61 of their neighbours, words at 0.1 to 0.3."""
_MOST_SEPARATORS = 0.1
"""Of random base 64 one letter in 32 is one; Qwen2-VL-7B-Instruct-AWQ has one in 5."""


_COMMIT = re.compile(r"[0-9a-f]{40}")


def random_parts_masked(found: re.Match[str], mask: str) -> str:
    """A find of ``LONG_RUN`` with what is more like a key than like words replaced by ``mask``."""
    run = found.group()
    if _COMMIT.fullmatch(run) and found.string[found.start() - 1 : found.start()] == "@":
        return run  # repository@commit
    if len(run) == _AWS_SECRET_LETTERS and _is_mixed(run):
        return mask
    run = _MIXED_PART.sub(lambda part: mask if _is_mixed(part.group()) else part.group(), run)
    return _PART.sub(lambda part: mask if _is_random(part.group()) else part.group(), run)


def _kind(letter: str) -> int:
    return 0 if letter.isdigit() else 1 if letter.islower() else 2 if letter.isupper() else 3


def _is_mixed(part: str) -> bool:
    """Whether small letters, capitals and digits take turns as they do in random base 64."""
    kinds = [_kind(letter) for letter in part]
    changes = sum(kinds[at] != kinds[at - 1] for at in range(1, len(kinds)))
    words = kinds.count(3) > _MOST_SEPARATORS * len(part)
    return {0, 1, 2} <= set(kinds) and not words and changes >= _MIXED_SHARE * len(part)


def _is_random(part: str) -> bool:
    """Whether a run of letters and digits is more like a key than like words: kinds alternate, and its
    entropy is high.

    3 bits a character is what 32 random hexadecimal digits hardly ever fall below, and prose without digits
    is left alone.
    """
    kinds = groupby(char.isdigit() for char in part if char.isalnum())
    changes = sum(1 for _ in kinds) - 1
    if changes < 3:
        return False
    counts = Counter(part)
    entropy_bits = -sum(n / len(part) * math.log2(n / len(part)) for n in counts.values())
    return entropy_bits >= 3.0


_AFTER_SCHEME = re.compile(r"""://([^\s"'`<>|]+)""")
"""Begun at its fixed part: a scheme before it is a word of any length."""
_WITHOUT_SCHEME = re.compile(r"""(?<![\w./:@+-])([\w.-]{1,64}:)[^\s@/"'`<>:=]{1,256}@(?=\w)(?!sha256)""")
"""``user:password@host``, as drivers of databases and rsync take it."""
_WEBHOOK = re.compile(r"(?i:(?:^|/)hooks?\.[^/]+/|/(?:web)?hooks?(?:b2)?/|^maker\.ifttt\.com/)")
"""Slack, Discord, Teams, Mattermost, Zapier, GitLab and others with such paths."""
_CONTAINER_BEFORE_AT = ("abfs", "abfss", "wasb", "wasbs")
"""Schemes of Azure, in which a container's name stands before the ``@``."""


def mask_urls(text: str, mask: str) -> str:
    """``text`` with users and passwords in URLs, and the paths of webhooks, replaced by ``mask``."""

    def replace(found: re.Match[str]) -> str:
        scheme = text[max(0, found.start() - 8) : found.start()].lower()
        return "://" + _mask_rest(found[1], scheme.endswith(_CONTAINER_BEFORE_AT), mask)

    text = _AFTER_SCHEME.sub(replace, text)
    return _WITHOUT_SCHEME.sub(rf"\g<1>{mask}@", text)


def _mask_rest(rest: str, names_container: bool, mask: str) -> str:
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    # A password may hold a slash or an @; what follows the last one is then the host. A digest is none.
    last = rest.rfind("@") if ":" in authority else -1
    at = authority.rfind("@") if rest.startswith("sha256:", last + 1) else max(authority.rfind("@"), last)
    if at >= 0 and not (names_container and ":" not in authority[:at]):
        rest = f"{mask}@{rest[at + 1 :]}"
    hook = _WEBHOOK.search(rest)
    return rest[: hook.end()] + mask if hook else rest
