"""Which names of options, variables and headers hold a secret, as far as a name can say."""

from __future__ import annotations

import re

_SECRET_WORD = re.compile(
    "token|secrets?|passwords?|passwd|passphrase|pass|pwd|pw|credentials?|apikeys?|accesskey|secretkey|privatekey"
    "|auth|authorization|bearer|cookies?|webhooks?|dsn|jwt|pat|apitoken|authtoken|accesstoken|userpw|userpwd|sas"
)
_KEY_WORD = re.compile(
    "api|access|private|secret|auth|account|encryption|wandb|license|openai|anthropic|comet|neptune|clearml|signing"
    "|service|master|session|shared|app|application|admin|deploy|storage|hmac|client|webhook|aws|azure|gcp|hf"
)
"""Before "key"."""
_TOKEN_OF_TEXT = re.compile(
    "pad|bos|eos|unk|mask|sep|cls|image|img|video|audio|vision|special|stop|next|per|num|n|max|min|new|prompt|first"
    "|last|begin|end|start|think|response|instruction|system|assistant|placeholder|extra|additional|dist|register"
    "|class|patch|text|word|decoder|encoder|separator|forced|mark|prefix|suffix|middle|eot|eod|eom|trigger"
)
"""Before "token": what a language model reads, not what opens a door."""
_PASS_OF_WORK = re.compile("forward|backward|single|one|two|multi|num|n|first|second|low|high|band|max|per")
"""Before "pass"."""
_TWO_WORDS = ("connection string", "webhook url", "hook url", "access signature", "key secret")
_SAYS_NOTHING = re.compile(r"\d+|value|string|str|base64|b|raw|plain|plaintext|default|env")
"""Last words that leave it to the one before: HF_TOKEN_2, password_b64."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_DEFINE = re.compile(r"^-D(?=[a-z])")
"""As in ``-Dpassword=x``, of Java and CMake."""
_LONGEST_NAME = 200
"""Letters; of a longer name the last ones decide."""


def names_secret(name: str) -> bool:
    """Whether an option or variable of this name holds a secret: its last word decides (``--max-tokens`` does
    not).
    """
    words = [word.lower() for word in _WORD.findall(_DEFINE.sub("", name[-_LONGEST_NAME:]))]
    while len(words) > 1 and _SAYS_NOTHING.fullmatch(words[-1]) and " ".join(words[-2:]) not in _TWO_WORDS:
        words.pop()
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if f"{before} {last}" in _TWO_WORDS:
        return True
    if last in ("key", "keys"):
        return _KEY_WORD.fullmatch(before) is not None
    if last == "token" and _TOKEN_OF_TEXT.fullmatch(before):
        return False
    if last == "pass" and _PASS_OF_WORK.fullmatch(before):
        return False
    return _SECRET_WORD.fullmatch(last) is not None


_QUERY_WORD = re.compile(r"token|key|secret|passw|signature|credential|auth|^sig$|^code$", re.IGNORECASE)


def names_secret_of_url(name: str) -> bool:
    """Whether a parameter of a URL holds a secret: signatures of stores and keys of services do."""
    return _QUERY_WORD.search(name[-_LONGEST_NAME:]) is not None


_SWITCH_WORD = re.compile(
    r"-*(?:use|no|with|without|enable|disable|has|skip|require|trust|add)(?![a-z])", re.IGNORECASE
)


def is_switch(option: str) -> bool:
    """Whether an option says yes or no (``--use-auth-token``), so that another option may follow it."""
    return _SWITCH_WORD.match(option) is not None


_OPTION = re.compile(r"--[A-Za-z][A-Za-z_.-]*(?:=.*)?", re.DOTALL)


def holds_value(option: str, following: str) -> bool:
    """Whether ``following`` is the value of ``option``, which names a secret: what looks like a long option is one, and
    anything that begins with a dash after a switch.
    """
    if not following.startswith("-"):
        return True
    return not is_switch(option) and _OPTION.fullmatch(following) is None


_SAYS_NO_SECRET = re.compile(r"|true|false|none|null|yes|no|on|off|\*\*\*", re.IGNORECASE)


def is_no_secret(value: str) -> bool:
    """Whether a value only says yes or no, or is masked already."""
    return _SAYS_NO_SECRET.fullmatch(value) is not None


SHORT_OPTIONS = {
    "sshpass": ("-p",),
    "curl": ("-u", "--user", "-U", "--proxy-user"),
    "mysql": ("-p",), "mysqldump": ("-p",), "mysqladmin": ("-p",), "mariadb": ("-p",),
    "redis-cli": ("-a",),
    "smbclient": ("-U",),
    "ldapsearch": ("-w",),
    "docker login": ("-p",), "podman login": ("-p",), "az login": ("-p",),
}  # fmt: skip
"""Programs whose short options hold passwords. Of all others ``-p`` is a port, a path, a partition: masking it everywhere
would take more from the reader than it keeps from a thief."""
ATTACHED_ONLY = ("mysql", "mysqldump", "mysqladmin", "mariadb")
"""Theirs is ``-pSECRET``; after ``-p`` alone they ask, and the next word is a database."""
