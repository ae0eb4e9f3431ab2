"""Recognizes names of options, variables and headers that hold a secret, and finds the values after such names in any text: shell, JSON,
YAML, TOML, headers, URLs.

A text is read in one pass from left to right. A name is matched only from its first character, and each value is read once, so the
time is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
"""Services. Before "key", "tok" or "api", or after a word of ``_OF_SERVICE``: kaggle_key, wandb_api, tokens.hf."""
_OF_SERVICE = re.compile("tokens?|toks?|keys?|secrets?|passwords?|pwd|pat|auth|creds?|login")
"""Words before the name of a service."""
_KEY_WORD = re.compile(
    "api|access|private|secret|auth|account|encryption|enc|aes|crypto|ssh|licen[sc]e|signing|service|master|session|shared|app|application|admin|deploy"
    "|storage|hmac|client|webhook"
)
"""Words before "key"."""
_TOK_WORD = re.compile("api|access|auth|refresh|bearer|session|secret")
"""Words before "tok". Alone, "tok" is a tokenizer's, as are most "tokens"."""
_KEY_OF_DATA = re.compile(
    "sort|order|image|label|text|caption|audio|video|cache|group|primary|foreign|partition|input|output|target|data|dataset|sample"
    "|column|field|index|prompt|public|host|registry|config|state|metric|batch|feature|mr|rkey|map|dict|json"
)
"""Words before "KEY" in a variable that is not a secret; with any other word it is."""
_PIN_WORD = re.compile("|user|card|sim|hsm|so|security|auth")
"""Words before "pin", or none. Memory, threads and cores are pinned, too."""
_TOKEN_OF_TEXT = re.compile(
    "pad|bos|eos|unk|mask|sep|cls|image|img|video|audio|vision|special|stop|next|per|num|n|max|min|new|prompt|first"
    "|last|begin|end|start|think|response|instruction|system|assistant|placeholder|extra|additional|dist|register"
    "|class|patch|text|word|decoder|encoder|separator|forced|mark|prefix|suffix|middle|eot|eod|eom|trigger"
)
"""Words before "token" that refer to tokens of a language model."""
_JOINED_WORDS = re.compile(
    "[a-z]+(?:passwor[dt]|passwd|passphrase|passcode|secret|apikey|credential)s?"
    f"|(?:{_SERVICE.pattern}|{_KEY_WORD.pattern}|bot)(?:keys?|token|pass|pwd|pat)"
    "|(?:db|sql|pg|user|root|smtp|mail|ftp)(?:pass|pwd|pw)"
)
"""Two words written as one: PGPASSWORD, clientsecret, hftoken. Excludes endings of English words such as "hotkey" and "compass"."""
_DATA_PASS_WORD = re.compile("forward|backward|single|one|two|multi|num|n|first|second|low|high|band|max|per")
"""Words before "pass" that refer to a pass over data."""
_TWO_WORDS = (
    *("connection string", "webhook url", "hook url", "access signature", "key secret"),
    *("otp code", "mfa code", "pin code", "access code", "security code"),
    *("pass word", "pass phrase", "pass code"),
)
_IGNORED_LAST_WORD = re.compile(r"\d+|value|string|str|base64|b|raw|plain|plaintext|default|env")
"""Last words that are ignored in favour of the previous one: HF_TOKEN_2, password_b64."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_DEFINE = re.compile(r"^-D(?=[a-z])")
"""``-Dpassword=x``, as in Java and CMake."""
_LONGEST_NAME = 200
"""Characters from the end of a name that are examined."""


def names_secret(name: str) -> bool:
    """Whether an option or variable with this name holds a secret. Its last word decides: ``--max-tokens`` does not."""
    words = [word.lower() for word in _WORD.findall(_DEFINE.sub("", name[-_LONGEST_NAME:]))]
    while (
        len(words) > 1 and _IGNORED_LAST_WORD.fullmatch(words[-1]) and " ".join(words[-2:]) not in _TWO_WORDS
    ):
        words.pop()
    if not words:
        return False
    if len(words) > 1 and _SERVICE.fullmatch(words[-1]) and _OF_SERVICE.fullmatch(words[-2]):
        return len(words) < 3 or _TOKEN_OF_TEXT.fullmatch(words[-3]) is None
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if f"{before} {last}" in _TWO_WORDS:
        return True
    if last in _AMBIGUOUS_WORDS:
        return _AMBIGUOUS_WORDS[last](before, name)
    if last == "token" and _TOKEN_OF_TEXT.fullmatch(before):
        return False
    if last == "pass" and _DATA_PASS_WORD.fullmatch(before):
        return False
    return _SECRET_WORD.fullmatch(last) is not None or _JOINED_WORDS.fullmatch(last) is not None


def _is_key(before: str, name: str) -> bool:
    if _KEY_WORD.fullmatch(before) or _SERVICE.fullmatch(before):
        return True
    return bool(before) and name.isupper() and _KEY_OF_DATA.fullmatch(before) is None


def _is_tok(before: str, name: str) -> bool:
    return bool(_TOK_WORD.fullmatch(before) or _SERVICE.fullmatch(before))


_AMBIGUOUS_WORDS: dict[str, Callable[[str, str], bool]] = {
    "key": _is_key, "keys": _is_key, "tok": _is_tok, "toks": _is_tok,
    "tokens": lambda before, name: _TOK_WORD.fullmatch(before) is not None,
    "api": lambda before, name: _SERVICE.fullmatch(before) is not None,
    "pin": lambda before, name: _PIN_WORD.fullmatch(before) is not None,
}  # fmt: skip
"""Last words that mean a secret only after certain other words."""


_QUERY_WORD = re.compile(r"token|key|secret|passw|signature|credential|auth|^sig$|^code$", re.IGNORECASE)


def names_secret_of_url(name: str) -> bool:
    """Whether a URL parameter holds a secret, such as signatures of stores and keys of services."""
    return _QUERY_WORD.search(name[-_LONGEST_NAME:]) is not None


_SWITCH_WORD = re.compile(
    r"-*(?:use|no|with|without|enable|disable|has|skip|require|trust|add)(?![a-z])", re.IGNORECASE
)
"""Beginning of a yes/no option (``--use-auth-token``), which another option may follow."""
_PAIR = re.compile(r"[^\s:/-][^\s:/]*[:/][^\s/]*(?<!\.sh)(?<!\.py)")
_OPTION = re.compile(r"--[A-Za-z][A-Za-z_.-]*(?:=.*)?", re.DOTALL)


def holds_value(option: str, following: str) -> bool:
    """Whether ``following`` is the value of ``option``, whose name indicates a secret. It is not if it looks like a long option or,
    after a switch, begins with a dash. The value of a login must be a name with a password: ``bash --login`` has none."""
    if option.lower().endswith("login") and _PAIR.fullmatch(following.strip("\"'")) is None:
        return False
    if not following.startswith("-"):
        return True
    return _SWITCH_WORD.match(option) is None and _OPTION.fullmatch(following) is None


_NO_SECRET = re.compile(r"|true|false|none|null|yes|no|on|off|\*\*\*", re.IGNORECASE)


def is_no_secret(value: str) -> bool:
    """Whether a value only means yes or no, or is already masked."""
    return _NO_SECRET.fullmatch(value) is not None


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
"""Programs whose short options hold passwords. In other programs ``-p`` is a port, path or partition, and masking it everywhere
would hide more useful text than secrets."""
ATTACHED_ONLY = ("mysql", "mysqldump", "mysqladmin", "mariadb", "7z", "7za")
"""Programs that take ``-pSECRET``. After ``-p`` alone they prompt, and the next word is a database or file."""


_INTRODUCTION = re.compile(
    r"(?<![\w.+-])(?P<name>[\w.+-]*\w)(?P<separator>"
    # name= name: name => "name": ['name'] = name%3D
    r"\\{0,7}[\"'`]?\]?[ \t]{0,8}(?:=>|:=|=|:|%3[AaDd])[ \t]{0,8}"
    # "name", "value": lists of arguments, setenv("NAME", "value")
    r"|\\{0,7}[\"'`][ \t]{0,8},[ \t\n]{0,8}(?=\\{0,7}[\"'`])"
    # --name value
    r"|(?P<space>(?:[ \t\n]|\\\n){1,12}))"
)
_QUOTED = r"""(?:"(?:[^"\\]|\\.)*(?:"|\Z)|'(?:[^'\\]|\\.)*(?:'|\Z)|`[^`]*(?:`|\Z))"""
_INNER_QUOTED = rf"""(?=["'`][^\s,;:)}}\]&|"'`]){_QUOTED}"""
"""A quote inside a word continues the word if another character of it follows. Otherwise it closes an outer quote."""
_STARTS_QUOTED = re.compile(rf"""\$?{_QUOTED}(?:{_INNER_QUOTED}|\\.|[^\s"'`\\,;:)}}\]&|])*""", re.DOTALL)
_ESCAPED_QUOTED = re.compile(r"""(?P<q>\\{1,7}["'])(?:(?!(?P=q)).)*(?:(?P=q)|\Z)""", re.DOTALL)
_LIST = re.compile(r"\[[^\]]*(?:\]|\Z)|\{[^}]*(?:\}|\Z)")
_BARE = re.compile(rf"""(?:\$\([^)]*(?:\)|\Z)|[^\s"'`\\]|\\[^"'`]|{_INNER_QUOTED})+""", re.DOTALL)
_ENDS_SENTENCE = ";,)}]|&>"
_QUERY_VALUE = re.compile(r"""[^&#;\s"'`<>\\]*""")
_REST_OF_LINE = re.compile(r"""[^\n"'`]*""")
_SCHEME = re.compile(r"(?i:bearer|basic|token|digest|negotiate|apikey)[ \t]+(?=\S)")
_HEADER_NAME = re.compile(r"(?i:(?:proxy-)?authorization|(?:set-)?cookie)")
_LABEL = ("name", "key", "variable")
_HASH_NAME = re.compile(r"(?:.*[\W_])?(?:revision|rev|commit|sha\d*|hash|digest|checksum|md5)", re.IGNORECASE)
_HASH = re.compile(r"[0-9a-f]{7,128}(?![\w+/=-])")
"""Hexadecimal digits of a commit or file; not a secret if the name indicates a hash."""

_NAMES_NEXT = re.compile(r"[ \t]{0,8}[:=]")
"""After a name and a comma, the next string is another name if this follows it: ``"token", "value": 3``."""

_DATA_PASS = re.compile(r"\b(?:for|back)ward $")

_ARGUMENT = r"""(?:'[^']*'?|"[^"]*"?|[^\s"';|]+)"""
_PROGRAM = re.compile(
    rf"(?<![\w-])(?P<program>{'|'.join(p.replace(' ', '[ ]{1,4}') for p in sorted(SHORT_OPTIONS, key=len, reverse=True))})(?=\s)"
)
_NEAR_LENGTH = 300
"""Characters after a program's name in which its option is searched, and upper limit of a "name" in JSON."""


def secret_values(text: str) -> Iterator[tuple[int, int, bool]]:
    """Yield (begin, end, secret) of each value whose name indicates a secret or, with secret False, a hash."""
    position, label = 0, ""
    while True:
        found = _INTRODUCTION.search(text, position)
        if found is None:
            return
        name, position = found["name"], found.end()
        if found["space"] is not None and not name.startswith("-"):
            continue
        in_query = found.start() > 0 and text[found.start() - 1] in "?&"
        if name.lower() in _LABEL and not in_query:
            near = text[position : position + _NEAR_LENGTH]
            label = _plain(near[: _word_end(near, 0)])
            continue
        if in_query and names_secret_of_url(name):
            end = _match_end(_QUERY_VALUE, text, position)
        elif names_secret(name) or (name.lower() == "value" and names_secret(label)):
            position, end = _value(text, found)
        else:
            hashed = _HASH.match(text, position) if _HASH_NAME.fullmatch(name) else None
            if hashed:
                yield position, hashed.end(), False
            continue
        value = text[position:end]
        if _is_other_text(text, found, value, end):
            continue
        if not is_no_secret(_plain(value)):
            yield position, end, True
        position = max(end, position)


def _is_other_text(text: str, found: re.Match[str], value: str, end: int) -> bool:
    """Whether the text after a name, up to ``end``, is not its value: it is the next word, a pass over data, or the next name of a
    list."""
    name = found["name"]
    if found["space"] is not None and not holds_value(name, value):
        return True
    if name == "pass" and _DATA_PASS.search(text, max(0, found.start() - 10), found.start()):
        return True
    return "," in found["separator"] and _NAMES_NEXT.match(text, end) is not None


def is_hash(name: str, value: str) -> bool:
    """Whether ``value`` is the hash of a commit or file, according to its name."""
    return _HASH_NAME.fullmatch(name) is not None and _HASH.fullmatch(value) is not None


def program_secrets(text: str) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of each value of a program's short option that holds a password, as in ``sshpass -p x``."""
    for found in _PROGRAM.finditer(text):
        program = " ".join(found["program"].split())
        gap = "" if program in ATTACHED_ONLY else r"[ \t=]{0,4}"
        options = "|".join(map(re.escape, SHORT_OPTIONS[program]))
        option = re.compile(rf"\s(?:{options}){gap}(?P<value>{_ARGUMENT})")
        inside = re.compile(r"[^\n;|]*").match(text, found.end(), found.end() + _NEAR_LENGTH)
        hit = option.search(text, found.end(), inside.end()) if inside else None
        if hit:
            yield hit.span("value")


def _value(text: str, found: re.Match[str]) -> tuple[int, int]:
    """Begin and end of the value after ``found``."""
    begin = found.end()
    if ":" in found["separator"]:
        before = text[found.start() - 1] if found.start() else "\n"
        alone = before in "\n\"'`" and found["separator"].startswith(":")
        quoted = text[begin : begin + 1] in ("'", '"', "`", "\\")
        if _HEADER_NAME.fullmatch(found["name"]) or (alone and not quoted):
            # A header, or a line of YAML: the value may contain spaces.
            scheme = _SCHEME.match(text, begin)
            begin = scheme.end() if scheme else begin
            end = _match_end(_REST_OF_LINE, text, begin)
            if end > begin:
                return begin, end
    return begin, _word_end(text, begin)


def _word_end(text: str, begin: int) -> int:
    first = text[begin : begin + 1]
    if first == "\\" and text[begin : begin + 8].lstrip("\\")[:1] in ("'", '"'):
        return _match_end(_ESCAPED_QUOTED, text, begin)
    if first in ("[", "{"):
        return _match_end(_LIST, text, begin)
    if first in ("'", '"', "`") or text[begin : begin + 2] in ("$'", '$"'):
        return _match_end(_STARTS_QUOTED, text, begin)
    end = _match_end(_BARE, text, begin)
    value = text[begin:end]
    return end if "$(" in value else begin + len(value.rstrip(_ENDS_SENTENCE) or value)


def _match_end(pattern: re.Pattern[str], text: str, begin: int) -> int:
    found = pattern.match(text, begin)
    return found.end() if found else begin


def _plain(value: str) -> str:
    return value.strip("\\\"'`, \t")
