"""Finds the values of secrets in any text, by the names before them: in shell, JSON, YAML, TOML, headers, URLs.

One pass from left to right. A name is read from its first letter only, and a value is read once, so that the work grows
with the text and not with its square.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from .secretnames import (
    ATTACHED_ONLY,
    SHORT_OPTIONS,
    holds_value,
    is_no_secret,
    names_secret,
    names_secret_of_url,
)

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
"""A quote inside of a word goes on with it where a letter follows; elsewhere it ends what holds the word."""
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
"""The hexadecimal digits of a commit or a file are no key where their name says so."""

_NAMES_NEXT = re.compile(r"[ \t]{0,8}[:=]")
"""Behind what follows a name and a comma: it is the next name, as in ``"token", "value": 3``."""

_OF_WORK = re.compile(r"\b(?:for|back)ward $")

_WORD = r"""(?:'[^']*'?|"[^"]*"?|[^\s"';|]+)"""
_PROGRAM = re.compile(
    rf"(?<![\w-])(?P<program>{'|'.join(p.replace(' ', '[ ]{1,4}') for p in sorted(SHORT_OPTIONS, key=len, reverse=True))})(?=\s)"
)
_NEAR = 300
"""Letters after a program's name in which its option is looked for, and of what a "name" in JSON may be."""


def secret_values(text: str) -> Iterator[tuple[int, int, bool]]:
    """(begin, end, secret) of each value whose name says that it is a secret, or (not secret) that it is a hash."""
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
            near = text[position : position + _NEAR]
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
        if _stands_for_something_else(text, found, value, end):
            continue
        if not is_no_secret(_plain(value)):
            yield position, end, True
        position = max(end, position)


def _stands_for_something_else(text: str, found: re.Match[str], value: str, end: int) -> bool:
    """Whether what follows a name, up to ``end``, is not its value: the next word, a pass over data, or the next name of a list."""
    name = found["name"]
    if found["space"] is not None and not holds_value(name, value):
        return True
    if name == "pass" and _OF_WORK.search(text, max(0, found.start() - 10), found.start()):
        return True
    return "," in found["separator"] and _NAMES_NEXT.match(text, end) is not None


def is_hash(name: str, value: str) -> bool:
    """Whether ``value`` is the hash of a commit or a file, as its name says."""
    return _HASH_NAME.fullmatch(name) is not None and _HASH.fullmatch(value) is not None


def program_secrets(text: str) -> Iterator[tuple[int, int]]:
    """(begin, end) of each value of a program's short option that holds a password, as in ``sshpass -p x``."""
    for found in _PROGRAM.finditer(text):
        program = " ".join(found["program"].split())
        gap = "" if program in ATTACHED_ONLY else r"[ \t=]{0,4}"
        options = "|".join(map(re.escape, SHORT_OPTIONS[program]))
        option = re.compile(rf"\s(?:{options}){gap}(?P<value>{_WORD})")
        inside = re.compile(r"[^\n;|]*").match(text, found.end(), found.end() + _NEAR)
        hit = option.search(text, found.end(), inside.end()) if inside else None
        if hit:
            yield hit.span("value")


def _value(text: str, found: re.Match[str]) -> tuple[int, int]:
    """Where the value after ``found`` begins and ends."""
    begin = found.end()
    if ":" in found["separator"]:
        before = text[found.start() - 1] if found.start() else "\n"
        alone = before in "\n\"'`" and found["separator"].startswith(":")
        quoted = text[begin : begin + 1] in ("'", '"', "`", "\\")
        if _HEADER_NAME.fullmatch(found["name"]) or (alone and not quoted):
            # A header, or a line of YAML: the value may have spaces.
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
