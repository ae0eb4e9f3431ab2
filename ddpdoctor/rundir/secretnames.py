"""Which names of options, variables and headers hold a secret, as far as a name can say."""

from __future__ import annotations

import re
from typing import Callable

_SECRET_WORD = re.compile(
    "token|secrets?|passwor[dt]s?|passwd|passphrase|passcode|pincode|passw|pass|pwd|pswd?|psw|pw|credentials?|creds?|apikeys?|accesskey|secretkey"
    "|privatekey|auth|authorization|bearer|cookies?|webhooks?|dsn|jwt|pat|apitoken|authtoken|accesstoken|userpw|userpwd|sas"
    "|login|t?otp|mfa"
)
_SERVICE = re.compile(
    "wandb|openai|anthropic|comet|neptune|clearml|aws|azure|gcp|hf|huggingface|kaggle|git(?:hub|lab)|gh|ngc|nvidia|mlflow|slack"
    "|cohere|replicate|groq|mistral|gemini|google|dockerhub|pypi|minio|swanlab|roboflow|databricks|snowflake|tavily|runpod"
)
"""Before "key", "tok" or "api", or behind what it gives: kaggle_key, wandb_api, tokens.hf."""
_OF_SERVICE = re.compile("tokens?|toks?|keys?|secrets?|passwords?|pwd|pat|auth|creds?|login")
"""Before the name of a service."""
_KEY_WORD = re.compile(
    "api|access|private|secret|auth|account|encryption|enc|aes|crypto|ssh|licen[sc]e|signing|service|master|session|shared|app|application|admin|deploy"
    "|storage|hmac|client|webhook"
)
"""Before "key"."""
_TOK_WORD = re.compile("api|access|auth|refresh|bearer|session|secret")
"""Before "tok": alone that is a tokenizer's, as are most "tokens"."""
_KEY_OF_DATA = re.compile(
    "sort|order|image|label|text|caption|audio|video|cache|group|primary|foreign|partition|input|output|target|data|dataset|sample"
    "|column|field|index|prompt|public|host|registry|config|state|metric|batch|feature|mr|rkey|map|dict|json"
)
"""Before "KEY" in a variable of the environment, all others of which are secrets."""
_PIN_WORD = re.compile("|user|card|sim|hsm|so|security|auth")
"""Before "pin", or nothing: memory, threads and cores are pinned, too."""
_TOKEN_OF_TEXT = re.compile(
    "pad|bos|eos|unk|mask|sep|cls|image|img|video|audio|vision|special|stop|next|per|num|n|max|min|new|prompt|first"
    "|last|begin|end|start|think|response|instruction|system|assistant|placeholder|extra|additional|dist|register"
    "|class|patch|text|word|decoder|encoder|separator|forced|mark|prefix|suffix|middle|eot|eod|eom|trigger"
)
"""Before "token": what a language model reads, not what opens a door."""
_RUN_TOGETHER = re.compile(
    "[a-z]+(?:passwor[dt]|passwd|passphrase|passcode|secret|apikey|credential)s?"
    f"|(?:{_SERVICE.pattern}|{_KEY_WORD.pattern}|bot)(?:keys?|token|pass|pwd|pat)"
    "|(?:db|sql|pg|user|root|smtp|mail|ftp)(?:pass|pwd|pw)"
)
"""Two words written as one: PGPASSWORD, clientsecret, hftoken. No English word ends so, as "hotkey" and "compass" do."""
_PASS_OF_WORK = re.compile("forward|backward|single|one|two|multi|num|n|first|second|low|high|band|max|per")
"""Before "pass"."""
_TWO_WORDS = (
    "connection string",
    "webhook url",
    "hook url",
    "access signature",
    "key secret",
    "otp code",
    "mfa code",
    "pass word",
    "pass phrase",
    "pass code",
    "pin code",
    "access code",
    "security code",
)
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
    if len(words) > 1 and _SERVICE.fullmatch(words[-1]) and _OF_SERVICE.fullmatch(words[-2]):
        return len(words) < 3 or _TOKEN_OF_TEXT.fullmatch(words[-3]) is None
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if f"{before} {last}" in _TWO_WORDS:
        return True
    if last in _DEPENDS:
        return _DEPENDS[last](before, name)
    if last == "token" and _TOKEN_OF_TEXT.fullmatch(before):
        return False
    if last == "pass" and _PASS_OF_WORK.fullmatch(before):
        return False
    return _SECRET_WORD.fullmatch(last) is not None or _RUN_TOGETHER.fullmatch(last) is not None


def _is_key(before: str, name: str) -> bool:
    if _KEY_WORD.fullmatch(before) or _SERVICE.fullmatch(before):
        return True
    return bool(before) and name.isupper() and _KEY_OF_DATA.fullmatch(before) is None


def _is_tok(before: str, name: str) -> bool:
    return bool(_TOK_WORD.fullmatch(before) or _SERVICE.fullmatch(before))


_DEPENDS: dict[str, Callable[[str, str], bool]] = {
    "key": _is_key, "keys": _is_key, "tok": _is_tok, "toks": _is_tok,
    "tokens": lambda before, name: _TOK_WORD.fullmatch(before) is not None,
    "api": lambda before, name: _SERVICE.fullmatch(before) is not None,
    "pin": lambda before, name: _PIN_WORD.fullmatch(before) is not None,
}  # fmt: skip
"""Last words that are a secret's only behind certain others."""


_QUERY_WORD = re.compile(r"token|key|secret|passw|signature|credential|auth|^sig$|^code$", re.IGNORECASE)


def names_secret_of_url(name: str) -> bool:
    """Whether a parameter of a URL holds a secret: signatures of stores and keys of services do."""
    return _QUERY_WORD.search(name[-_LONGEST_NAME:]) is not None


_SWITCH_WORD = re.compile(
    r"-*(?:use|no|with|without|enable|disable|has|skip|require|trust|add)(?![a-z])", re.IGNORECASE
)
"""How an option begins that says yes or no (``--use-auth-token``), so that another option may follow it."""
_PAIR = re.compile(r"[^\s:/-][^\s:/]*[:/][^\s/]*(?<!\.sh)(?<!\.py)")
_OPTION = re.compile(r"--[A-Za-z][A-Za-z_.-]*(?:=.*)?", re.DOTALL)


def holds_value(option: str, following: str) -> bool:
    """Whether ``following`` is the value of ``option``, which names a secret: what looks like a long option is one, and
    anything that begins with a dash after a switch. A login is a name with a password: ``bash --login`` has none.
    """
    if option.lower().endswith("login") and _PAIR.fullmatch(following.strip("\"'")) is None:
        return False
    if not following.startswith("-"):
        return True
    return _SWITCH_WORD.match(option) is None and _OPTION.fullmatch(following) is None


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
    "7z": ("-p",), "7za": ("-p",), "zip": ("-P",), "unzip": ("-P",),
    "sqlcmd": ("-P",), "mongo": ("-p",), "mongosh": ("-p",),
    "docker login": ("-p",), "podman login": ("-p",), "az login": ("-p",),
}  # fmt: skip
"""Programs whose short options hold passwords. Of all others ``-p`` is a port, a path, a partition: masking it everywhere
would take more from the reader than it keeps from a thief."""
ATTACHED_ONLY = ("mysql", "mysqldump", "mysqladmin", "mariadb", "7z", "7za")
"""Theirs is ``-pSECRET``; after ``-p`` alone they ask, and the next word is a database or a file."""
