"""What names a machine, a person or a place by its form alone: addresses, paths, URLs, identifiers.

Each pattern begins at a fixed part or where a word begins, so that long texts are read in linear time.
"""

from __future__ import annotations

import ipaddress
import os.path
import re
from collections.abc import Callable, Iterable
from itertools import groupby

from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.rundir.packages import LIBRARY

_LETTER = r"[^\s'\"`,;:<>|()\[\]{}=/\\]"
_VERB = r"(?:is|was|are|were|has|have|had|holds|cannot|could|does|did|will|wrote|took)\b"
_SEGMENT = rf"{_LETTER}+(?:(?: (?!{_VERB}|\d+ ?/|[kMGT]?i?B/){_LETTER}+){{1,3}}(?=[/\\]{_LETTER}))?"
"""A folder's name may hold spaces, where another separator follows and no verb of a sentence comes before it."""
PATH = re.compile(
    rf"(?<![\w./\-])(?:(?:[A-Za-z]:)?(?:[/\\](?!/){_SEGMENT})+[/\\]?|\\\\{_SEGMENT}(?:\\{_SEGMENT})*|~[\w.-]*(?:/{_SEGMENT})+|~[\w-]{{2,}})"
)
"""An absolute path inside any text; what follows "://" is an address, not a path."""
_QUOTED_PATH = re.compile(
    r"(?P<quote>['\"`])(?P<path>(?:~|file:|[A-Za-z]:\\|\\\\|/(?!/))[^'\"`\n]*)(?P=quote)"
)
URL = re.compile(r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]{0,30})://[^\s'\"`<>|)\]}]*")
PUBLIC_HOSTS = frozenset([
    "pytorch.org", "docs.pytorch.org", "docs.nvidia.com", "developer.nvidia.com", "docs.python.org", "docs.kernel.org",
    "prometheus.io", "www.usenix.org", "www.deepspeed.ai", "ui.perfetto.dev", "docs.oasis-open.org", "json.schemastore.org",
    "json-schema.org",
])  # fmt: skip
"""Where documentation lies: links to it stay."""
_PUBLIC_FOLDERS = re.compile(r"https://(?:huggingface\.co/docs/|github\.com/(?:NVIDIA|pytorch)/)")
_MAIL = re.compile(r"(?<![\w.+-])[\w+-][\w.+-]{0,63}@[\w-]{1,63}(?:\.[\w-]{1,63}){0,5}\.[A-Za-z]{2,}(?!\w)")
_DOMAIN = re.compile(
    r"(?<![\w.-])(?:[A-Za-z0-9][\w-]{0,62}\.){1,8}"
    r"(?i:(?P<sure>com|org|edu|gov|mil|localdomain)|net|local|internal|lan|corp|cluster|intra|intranet|home|compute)(?![\w-])"
)
"""A full host name by its end. Where that could be a name in a program (threading.local), a digit or a hyphen must be in it."""
_MAC = re.compile(r"(?<![\w:-])[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5,19}(?![\w:-])")
_UUID = re.compile(r"(?<!\w)(?:(?:GPU|MIG)-)?[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?!\w)")
_GUID = re.compile(r"(?<!\w)(?:0x[0-9A-Fa-f]{16}|(?:[0-9A-Fa-f]{4}:){3}[0-9A-Fa-f]{4})(?![\w:])")
_IP_ADDRESS = re.compile(
    r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f:]{2,39}(?:%\w{1,15})?)(?![\w:]|\.\d)"
)

_MOST_LETTERS = 1 << 21
"""Of all names that are looked for: the hosts of a job of thirty thousand have fewer."""
_MOST_NESTED = 30
"""Groups of a pattern within each other."""

StandIn = Callable[[str, str], str]
"""(kind, name) → what stands for it."""


def any_of(names: Iterable[str], depth: int = 0) -> str:
    """A pattern for any of ``names``, the longest that fits. Those that begin alike are looked for together: thousands cost
    little more than a few. Raises DdpDoctorError where there are too many."""
    ordered = sorted(set(names))
    if depth == 0 and sum(map(len, ordered)) > _MOST_LETTERS:
        raise DdpDoctorError(
            f"names of more than {_MOST_LETTERS:,} letters together cannot be taken out of every text: nothing was redacted."
        )
    if len(ordered) == 1:
        return re.escape(ordered[0])
    if depth >= _MOST_NESTED:
        return f"(?:{'|'.join(map(re.escape, sorted(ordered, key=len, reverse=True)))})"
    pieces = []
    for _, alike in groupby(filter(None, ordered), key=lambda name: name[0]):
        group = list(alike)
        shared = os.path.commonprefix([group[0], group[-1]])  # noqa: RUF071 - of letters, not of folders
        pieces.append(re.escape(shared) + any_of((name[len(shared) :] for name in group), depth + 1))
    return f"(?:{'|'.join([*pieces, *(name for name in ordered if not name)])})"


def is_public(url: str) -> bool:
    """Whether ``url`` is a page of public documentation."""
    found = re.match(r"https://([^/:?#@]+)", url)
    return (found is not None and found[1] in PUBLIC_HOSTS) or _PUBLIC_FOLDERS.match(url) is not None


def without_paths(text: str, root: str | None, stand_in: StandIn) -> str:
    """``text`` with paths and URLs relative to the project or the library, else replaced."""

    def url(found: re.Match[str]) -> str:
        address = found[0].rstrip(".,:;!?")
        end = found[0][len(address) :]
        return found[0] if is_public(address) else f"{found[1]}://{stand_in('url', address)}{end}"

    def quoted(found: re.Match[str]) -> str:
        # Whole: what is quoted may hold any letter.
        return f"{found['quote']}{relative_path(found['path'], root, stand_in)}{found['quote']}"

    text = _QUOTED_PATH.sub(quoted, URL.sub(url, text))
    return PATH.sub(lambda found: relative_path(found[0], root, stand_in), text)


def relative_path(path: str, root: str | None, stand_in: StandIn) -> str:
    """Below the project's root or the library's; any other a stand-in, but for the name of a Python file."""
    library = LIBRARY.match(path)
    if library:
        return f"{library[1]}/{path[library.end() :]}"
    if root and (path.rstrip("/") == root or path.startswith(root + os.sep)):
        return path[len(root) :].strip("/") or "."
    folder, name = os.path.split(path.replace("\\", "/").rstrip("/"))
    if name.endswith(".py"):
        return f"{stand_in('path', folder)}/{name}"
    return stand_in("path", f"{folder}/{name}")


def without_identifiers(text: str, stand_in: StandIn) -> str:
    """``text`` without e-mail addresses, full host names, addresses of networks and identifiers of hardware."""

    def domain(found: re.Match[str]) -> str:
        name = found[0].lower()
        if name in PUBLIC_HOSTS or not (found["sure"] or re.search(r"[\d-]", name)):
            return found[0]
        return stand_in("host", name.partition(".")[0])

    def address(found: re.Match[str]) -> str:
        return stand_in("address", found[0].lower()) if _is_address(found[0]) else found[0]

    text = _MAIL.sub(lambda found: stand_in("mail", found[0].lower()), text)
    text = _DOMAIN.sub(domain, text)
    for pattern in (_UUID, _MAC, _GUID):
        text = pattern.sub(lambda found: stand_in("id", found[0].lower()), text)
    return _IP_ADDRESS.sub(address, text)


def _is_address(word: str) -> bool:
    if word.startswith("c10::"):
        return False  # C++, of which every letter is a hexadecimal digit
    try:
        return "." in word or (word.count(":") > 1 and bool(ipaddress.ip_address(word)))
    except ValueError:
        return False
