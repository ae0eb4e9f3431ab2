"""Finds names in a diagnosis (hosts, users, arguments, environment) and replaces them by pseudonyms."""

from __future__ import annotations

import getpass
import ipaddress
import os
import os.path
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import groupby
from typing import Any

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, Job
from ddpdoctor.errors import DdpDoctorError
from ddpdoctor.measure.facts import Facts
from ddpdoctor.measure.taxonomy import PARTS
from ddpdoctor.rundir.packages import LIBRARY

_PATH_CHARACTER = r"[^\s'\"`,;:<>|()\[\]{}=/\\]"
_VERB = r"(?:is|was|are|were|has|have|had|holds|cannot|could|does|did|will|wrote|took)\b"
_SEGMENT = rf"{_PATH_CHARACTER}+(?:(?: (?!{_VERB}|\d+ ?/|[kMGT]?i?B/){_PATH_CHARACTER}+){{1,3}}(?=[/\\]{_PATH_CHARACTER}))?"
"""Matches a part of a path. It may contain up to three spaces if a separator follows and no word after a space is a verb."""
PATH = re.compile(
    rf"(?<![\w./\-])(?:(?:[A-Za-z]:)?(?:[/\\](?!/){_SEGMENT})+[/\\]?|\\\\{_SEGMENT}(?:\\{_SEGMENT})*|~[\w.-]*(?:/{_SEGMENT})+|~[\w-]{{2,}})"
)
"""Matches an absolute path in a text, except the part of a URL after "://"."""
_QUOTED_PATH = re.compile(
    r"(?P<quote>['\"`])(?P<path>(?:~|file:|[A-Za-z]:\\|\\\\|/(?!/))[^'\"`\n]*)(?P=quote)"
)
URL = re.compile(r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]{0,30})://[^\s'\"`<>|)\]}]*")
PUBLIC_HOSTS = frozenset([
    "pytorch.org", "docs.pytorch.org", "docs.nvidia.com", "developer.nvidia.com", "docs.python.org", "docs.kernel.org",
    "prometheus.io", "www.usenix.org", "www.deepspeed.ai", "ui.perfetto.dev", "docs.oasis-open.org", "json.schemastore.org",
    "json-schema.org", "lightning.ai", "docs.ray.io",
])  # fmt: skip
"""Hosts of public documentation. Links to them are kept."""
_PUBLIC_FOLDERS = re.compile(
    r"https://(?:huggingface\.co/docs/|github\.com/(?:NVIDIA|pytorch|Lightning-AI)/)"
)
_MAIL = re.compile(r"(?<![\w.+-])[\w+-][\w.+-]{0,63}@[\w-]{1,63}(?:\.[\w-]{1,63}){0,5}\.[A-Za-z]{2,}(?!\w)")
_DOMAIN = re.compile(
    r"(?<![\w.-])(?:[A-Za-z0-9][\w-]{0,62}\.){1,8}"
    r"(?i:(?P<sure>com|org|edu|gov|mil|localdomain)|net|local|internal|lan|corp|cluster|intra|intranet|home|compute)(?![\w-])"
)
"""Matches a full host name by its ending. With an ending outside ``sure`` it must contain a digit or a hyphen, because it could be a
name in a program (threading.local)."""
_MAC = re.compile(r"(?<![\w:-])[0-9A-Fa-f]{2}(?:[:-][0-9A-Fa-f]{2}){5,19}(?![\w:-])")
_UUID = re.compile(r"(?<!\w)(?:(?:GPU|MIG)-)?[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?!\w)")
_GUID = re.compile(r"(?<!\w)(?:0x[0-9A-Fa-f]{16}|(?:[0-9A-Fa-f]{4}:){3}[0-9A-Fa-f]{4})(?![\w:])")
_IP_ADDRESS = re.compile(
    r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9A-Fa-f:]{2,39}(?:%\w{1,15})?)(?![\w:]|\.\d)"
)

_MAX_CHARACTERS = 1 << 21
"""Maximum number of characters of all names together. The host names of 30,000 hosts have fewer."""
_MAX_DEPTH = 30
"""Maximum nesting depth of groups in a pattern."""

Pseudonym = Callable[[str, str], str]
"""(kind, name) → pseudonym."""


def any_of(names: Iterable[str], depth: int = 0) -> str:
    """A pattern that matches any of ``names`` and prefers the longest. Common prefixes are factored out, so that thousands of names
    take little more time than a few. Raises DdpDoctorError if there are too many."""
    ordered = sorted(set(names))
    if depth == 0 and sum(map(len, ordered)) > _MAX_CHARACTERS:
        raise DdpDoctorError(
            f"too many names to redact: together they have more than {_MAX_CHARACTERS:,} characters. Nothing was redacted."
        )
    if len(ordered) == 1:
        return re.escape(ordered[0])
    if depth >= _MAX_DEPTH:
        return f"(?:{'|'.join(map(re.escape, sorted(ordered, key=len, reverse=True)))})"
    pieces = []
    for _, with_same_initial in groupby(filter(None, ordered), key=lambda name: name[0]):
        group = list(with_same_initial)
        shared = os.path.commonprefix([group[0], group[-1]])  # noqa: RUF071 - of letters, not of folders
        pieces.append(re.escape(shared) + any_of((name[len(shared) :] for name in group), depth + 1))
    return f"(?:{'|'.join([*pieces, *(name for name in ordered if not name)])})"


def is_public(url: str) -> bool:
    """Whether ``url`` is a page of public documentation."""
    found = re.match(r"https://([^/:?#@]+)", url)
    return (found is not None and found[1] in PUBLIC_HOSTS) or _PUBLIC_FOLDERS.match(url) is not None


def without_paths(text: str, root: str | None, pseudonym: Pseudonym) -> str:
    """``text`` with paths made relative to the project or library, and other paths and URLs replaced. Public URLs are kept."""

    def url(found: re.Match[str]) -> str:
        address = found[0].rstrip(".,:;!?")
        end = found[0][len(address) :]
        return found[0] if is_public(address) else f"{found[1]}://{pseudonym('url', address)}{end}"

    def quoted(found: re.Match[str]) -> str:
        # A quoted path may contain any character.
        return f"{found['quote']}{relative_path(found['path'], root, pseudonym)}{found['quote']}"

    text = _QUOTED_PATH.sub(quoted, URL.sub(url, text))
    return PATH.sub(lambda found: relative_path(found[0], root, pseudonym), text)


def relative_path(path: str, root: str | None, pseudonym: Pseudonym) -> str:
    """``path`` relative to the project or the library; else a pseudonym, followed by the name of a Python file."""
    library = LIBRARY.match(path)
    if library:
        return f"{library[1]}/{path[library.end() :]}"
    if root and (path.rstrip("/") == root or path.startswith(root + os.sep)):
        return path[len(root) :].strip("/") or "."
    folder, name = os.path.split(path.replace("\\", "/").rstrip("/"))
    if name.endswith(".py"):
        return f"{pseudonym('path', folder)}/{name}"
    return pseudonym("path", f"{folder}/{name}")


def without_identifiers(text: str, pseudonym: Pseudonym) -> str:
    """``text`` with e-mail addresses, full host names, network addresses and hardware identifiers replaced."""

    def domain(found: re.Match[str]) -> str:
        name = found[0].lower()
        if name in PUBLIC_HOSTS or not (found["sure"] or re.search(r"[\d-]", name)):
            return found[0]
        return pseudonym("host", name.partition(".")[0])

    def address(found: re.Match[str]) -> str:
        return pseudonym("address", found[0].lower()) if _is_address(found[0]) else found[0]

    text = _MAIL.sub(lambda found: pseudonym("mail", found[0].lower()), text)
    text = _DOMAIN.sub(domain, text)
    for pattern in (_UUID, _MAC, _GUID):
        text = pattern.sub(lambda found: pseudonym("id", found[0].lower()), text)
    return _IP_ADDRESS.sub(address, text)


def _is_address(word: str) -> bool:
    if word.startswith("c10::"):
        return False  # a C++ namespace whose letters are all hexadecimal digits
    try:
        return "." in word or (word.count(":") > 1 and bool(ipaddress.ip_address(word)))
    except ValueError:
        return False


_HOME = re.compile(r"(?:(?<![\w.\-])|[/\\])(?:home|Users|users|scratch|fsx)[/\\]([^/\\\s'\"]+)")
_TILDE = re.compile(r"(?<![\w.\-])~([\w.-]+)")
_USER_VARIABLES = ("USER", "LOGNAME", "USERNAME", "SLURM_JOB_USER", "SUDO_USER")
_NOT_USERS = {
    *("root", "nobody", "shared", "datasets", "projects", "project", "public", "tmp"),
    *("cache", "models", "checkpoints"),
}
"""Folders and accounts that are not names of users."""
_HOST_PORT = re.compile(r"(?<![\w.-])([A-Za-z][\w-]*(?:\.[\w-]+){0,8}):\d{4,5}(?!\w)")
_HOST_VARIABLES = ("MASTER_ADDR", "NCCL_COMM_ID", "NCCL_HOSTID", "TORCHELASTIC_RUN_ID")
_NUMBERED = re.compile(r"([A-Za-z][A-Za-z_-]*)(\d+)")
_MIN_VALUE_LENGTH = 8
"""Minimum length at which values of arguments and variables are replaced in all texts. Shorter ones ("gloo", "32") are common words."""

_TUNING_VARIABLES = re.compile(
    r"(NCCL|TORCH|PYTORCH|OMP|MKL|OPENBLAS|KMP|GLOO|CUDA|NVIDIA|HIP|ROCR|UCX|FI|RCCL)_\w+"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE"
)
"""Environment variables that tune a job. The values of all others are replaced."""
_IDENTIFYING_VARIABLES = re.compile(
    r"\w*(?:HOSTID|COMM_ID|RUN_ID|JOB_ID|ADDR|HOST|USER|NAME|PATH|DIR|FILE|URL)"
)
_INTERFACE_VARIABLES = (
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "UCX_NET_DEVICES",
    "NCCL_NET",
)
_TECHNICAL_WORD = re.compile(
    r"[+-]?\d{1,12}(?:\.\d+)?[a-z]{0,3}|0x[0-9a-f]{1,8}"
    # network interfaces and adapters
    r"|(?:eth|ib|bond|hsn|br|wlan|vlan|team|docker|cxi|mlx[45]_|mlx|bnxt_re|irdma|hfi1_|rdmap|rocep|ibp|roce)\d\w{0,12}"
    r"|en[opsx]\d\w{0,12}|efa_\d+|lo"
    # log levels and subsystems
    r"|version|warn|warning|info|abort|trace|debug|error|off|detail|init|coll|p2p|shm|net|graph|tuning|env|alloc|call"
    r"|proxy|nvls|bootstrap|reg|profile|ras|all|dynamo|inductor|aot|graph_breaks|recompiles|guards|distributed|ddp|c10d"
    # algorithms, protocols, paths of data
    r"|tree|ring|collnet|collnetdirect|collnetchain|nvlstree|pat|simple|ll|ll128|ib|socket|ofi|aws|loc|nvl|pix|pxb|phb|node"
    r"|sys|rc|dc|ud|rc_x|dc_x|self|tcp|udp|cuda|cuda_copy|cuda_ipc|sm|posix|sysv|cma|knem|rdmacm|verbs|cxi|efa|shm"
    # switches, threads, memory
    r"|true|false|yes|no|on|off|none|null|default|auto|any|enable|enabled|disable|disabled|expandable_segments"
    r"|max_split_size_mb|garbage_collection_threshold|roundup_power2_divisions|backend|native|cudamallocasync|async"
    r"|spread|close|master|primary|cores|threads|sockets|numa_domains|granularity|fine|compact|scatter|verbose|noverbose"
    r"|respect|norespect|static|dynamic|guided|active|passive|tbb|intel|gnu|sequential|gpu|cpu|nccl|gloo|mpi|ucc|highest"
    r"|high|medium|low|local|global|explicit|implicit",
    re.IGNORECASE,
)


_INTERPRETER = re.compile(r"python[\d.]*|bash|sh|java|node|perl|ruby")
"""Programs whose names say nothing of their user."""


class Pseudonyms:
    """Assigns a pseudonym to each kind and name, numbered in order of first use."""

    def __init__(self) -> None:
        self._given: dict[str, dict[str, str]] = {}

    def __call__(self, kind: str, name: str) -> str:
        known = self._given.setdefault(kind, {})
        return known.setdefault(name, f"{kind}-{len(known) + 1}")

    def host(self, name: str) -> str:
        """The pseudonym of a host, the same for its full and its short name, ignoring case."""
        return self("host", name.lower() if _is_number(name) else name.lower().partition(".")[0])


def _is_number(host: str) -> bool:
    return host.replace(".", "").isdigit()


def redacted_environment(environment: Mapping[str, str], pseudonym: Pseudonym) -> dict[str, str]:
    """The environment with all values replaced, except those of tuning variables that consist of numbers and known words."""
    return {
        name: value if _is_harmless(name, value) else pseudonym("value", value)
        for name, value in environment.items()
    }


def _is_harmless(name: str, value: str) -> bool:
    if not _TUNING_VARIABLES.fullmatch(name) or (
        _IDENTIFYING_VARIABLES.fullmatch(name) and name not in _INTERFACE_VARIABLES
    ):
        return False
    return all(not word or _TECHNICAL_WORD.fullmatch(word) for word in re.split(r"[\s,;:=+^%|{}-]", value))


def host_names(diagnosis: Diagnosis, pseudonyms: Pseudonyms) -> dict[str, str]:
    """Pseudonyms of all hosts, by full and by short name in lower case."""
    hosts = [*diagnosis.job.hosts, *(rank.host for rank in diagnosis.ranks if rank.host)]
    hosts += [source_host(series.source) for series in diagnosis.telemetry]
    hosts += _hosts_in_arguments(diagnosis.job)
    found: dict[str, str] = {}
    for host in map(str.lower, hosts):
        short, _, domain = host.partition(".")
        if _is_number(host) or host == "localhost":
            continue
        found[host] = found[short] = pseudonyms.host(host)
        if domain:
            found[domain] = "domain"
    return {name: pseudonym for name, pseudonym in found.items() if name not in reserved_words()}


def hide_programs(document: dict[str, Any], pseudonyms: Pseudonyms) -> dict[str, str]:
    """Replace the names of other programs in the facts of ``document``, apart from interpreters. Returns what replaces them in sentences,
    which show them as code: a name may be an ordinary word."""
    host = document["facts"].get("host")
    programs = host.get("other_programs") if isinstance(host, dict) else None
    replaced: dict[str, str] = {}
    for program in programs if isinstance(programs, list) else []:
        name = str(program.get("name") or "") if isinstance(program, dict) else ""
        if name and not _INTERPRETER.fullmatch(name):
            program["name"] = pseudonyms("program", name)
            replaced[f"`{name}`"] = f"`{program['name']}`"
    return replaced


def source_host(source: str) -> str:
    """The host in the source of a telemetry series: "node1" in "node1 GPU 0" and "node1 rank 3"."""
    return re.sub(r" (GPU|rank) \d+$", "", source)


def _hosts_in_arguments(job: Job) -> list[str]:
    """Hosts in the command's arguments and in environment variables."""
    texts = [
        *job.command,
        *(value for name, value in job.environment.items() if not _is_harmless(name, value)),
    ]
    hosts = [host for text in texts for host in _HOST_PORT.findall(text)]
    hosts += [
        value
        for name in _HOST_VARIABLES
        if re.fullmatch(r"[A-Za-z][\w.-]+", value := job.environment.get(name, ""))
    ]
    return [host for host in hosts if host.lower() not in ("localhost", "nvcr.io", "docker.io")]


def user_names(diagnosis: Diagnosis, texts: Iterable[str], pseudonym: Pseudonym) -> dict[str, str]:
    """Pseudonyms of users: from the environment, from home folders in texts, and the user of this process."""
    users = [diagnosis.job.environment.get(name, "") for name in _USER_VARIABLES]
    for text in texts:
        users += _HOME.findall(text) + _TILDE.findall(text)
    try:
        users.append(getpass.getuser())
    except (OSError, KeyError):
        pass  # an account without a name
    not_users = _NOT_USERS | reserved_words()
    known = dict.fromkeys(user.lower() for user in users if len(user) > 1)
    return {user: pseudonym("user", user) for user in known if user not in not_users}


def redacted_command(
    command: list[str], root: str | None, pseudonym: Pseudonym
) -> tuple[list[str], dict[str, str]]:
    """(Command with pseudonyms for its arguments, argument values to replace in other texts). Program and scripts are kept, without
    folders outside the project."""
    words, replaced = [], {}
    for index, word in enumerate(command):
        if index == 0:
            words.append(word.rpartition("/")[2])
        elif word.endswith(".py") and not word.startswith("-") and "://" not in word:
            inside = root is not None and word.startswith(root + os.sep)
            words.append(word if inside else word.rpartition("/")[2])
        elif word == "--":
            words.append(word)
        else:
            words.append(pseudonym("argument", word))
            value = word.partition("=")[2] if word.startswith("-") else word
            if len(value) >= _MIN_VALUE_LENGTH:
                replaced[value] = pseudonym("argument", word)
    return words, replaced


def hidden_values(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Pseudonyms of replaced values of variables that are long enough to be replaced in other texts, too."""
    return {
        value: after[name]
        for name, value in before.items()
        if after[name] != value and len(value) >= _MIN_VALUE_LENGTH and not _is_number(value)
    }


def replacer(names: Mapping[str, str], values: Mapping[str, str]) -> Callable[[str], str]:
    """A function that replaces whole words, longest first, so that "node1" does not match in "node12". ``names`` match regardless of
    case and also next to ``_``; ``values`` match exactly."""
    names_pattern = _word_pattern(names, "A-Za-z0-9", re.IGNORECASE)
    values_pattern = _word_pattern(values, r"\w", 0)

    def replace(text: str) -> str:
        if values_pattern:
            text = values_pattern.sub(lambda found: values[found[0]], text)
        return names_pattern.sub(lambda found: names[found[0].lower()], text) if names_pattern else text

    return replace


def _word_pattern(names: Iterable[str], letters: str, flags: int) -> re.Pattern[str] | None:
    known = [name for name in names if name]
    if not known:
        return None
    return re.compile(rf"(?<![{letters}]){any_of(known)}(?![{letters}])", flags)


def similarly_named_hosts(
    texts: Iterable[str], names: Mapping[str, str], pseudonyms: Pseudonyms
) -> dict[str, str]:
    """Pseudonyms of further hosts in ``texts`` with the same prefix and number of digits as one of ``names``: node18 if node17 is
    known."""
    forms = {(found[1], len(found[2])) for name in names if (found := _NUMBERED.fullmatch(name))}
    forms = {
        (letters, digits)
        for letters, digits in forms
        if letters.strip("_-") not in reserved_words() or digits > 1
    }
    if not forms:
        return {}
    by_digits: dict[int, list[str]] = {}
    for letters, digits in sorted(forms):
        by_digits.setdefault(digits, []).append(letters)
    shapes = "|".join(rf"{any_of(letters)}\d{{{digits}}}" for digits, letters in by_digits.items())
    pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{shapes})(?![A-Za-z0-9])", re.IGNORECASE)
    found_names = dict.fromkeys(word.lower() for text in texts for word in pattern.findall(text))
    return {name: pseudonyms.host(name) for name in found_names if name not in names}


@cache
def reserved_words() -> frozenset[str]:
    """Keys and terms of the diagnosis. They are never replaced, even if a host is called "data" or a user "train"."""
    names = [*_keys(msgspec.json.schema(Diagnosis)), *_keys(msgspec.json.schema(Facts)), *PARTS]
    words = {word for name in names for word in re.split(r"[\W_]+", name.lower())}
    return frozenset(
        words | {"gpu", "cuda", "train", "torch", "python", "localhost", "worker", "master", "server", "test"}
    )


def _keys(schema: Any) -> Iterable[str]:
    if isinstance(schema, dict):
        for name, inner in schema.items():
            if name == "properties":
                yield from inner
            yield from _keys(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _keys(inner)
