"""The names that a diagnosis gives away: of hosts, users, arguments and the environment, and what stands for them."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import msgspec

from ddpdoctor.diagnose.diagnosis import Diagnosis, Job
from ddpdoctor.measure.facts import Facts
from ddpdoctor.measure.taxonomy import PARTS
from ddpdoctor.report.redact_text import StandIn, any_of

_HOME = re.compile(r"(?:(?<![\w.\-])|[/\\])(?:home|Users|users|scratch|fsx)[/\\]([^/\\\s'\"]+)")
_TILDE = re.compile(r"(?<![\w.\-])~([\w.-]+)")
_USER_VARIABLES = ("USER", "LOGNAME", "USERNAME", "SLURM_JOB_USER", "SUDO_USER")
_NOBODY = frozenset(
    [
        "root",
        "nobody",
        "shared",
        "datasets",
        "projects",
        "project",
        "public",
        "tmp",
        "cache",
        "models",
        "checkpoints",
    ]
)
"""Folders beside those of people, and an account that everybody has."""
_HOST_PORT = re.compile(r"(?<![\w.-])([A-Za-z][\w-]*(?:\.[\w-]+){0,8}):\d{4,5}(?!\w)")
_HOST_VARIABLES = ("MASTER_ADDR", "NCCL_COMM_ID", "NCCL_HOSTID", "TORCHELASTIC_RUN_ID")
_NUMBERED = re.compile(r"([A-Za-z][A-Za-z_-]*)(\d+)")
_LONG_VALUE = 8
"""From this length on the value of an argument or a variable is replaced in every other text too; shorter ones ("gloo",
"32") are common words.
"""

_TUNING = re.compile(
    r"(NCCL|TORCH|PYTORCH|OMP|MKL|OPENBLAS|KMP|GLOO|CUDA|NVIDIA|HIP|ROCR|UCX|FI|RCCL)_\w+"
    r"|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE"
)
"""Environment variables that tune a job; the values of all others are replaced."""
_IDENTIFYING = re.compile(r"\w*(?:HOSTID|COMM_ID|RUN_ID|JOB_ID|ADDR|HOST|USER|NAME|PATH|DIR|FILE|URL)")
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "UCX_NET_DEVICES", "NCCL_NET")
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


class StandIns:
    """One stand-in per name and kind, in the order of first sight."""

    def __init__(self) -> None:
        self._given: dict[str, dict[str, str]] = {}

    def __call__(self, kind: str, name: str) -> str:
        known = self._given.setdefault(kind, {})
        return known.setdefault(name, f"{kind}-{len(known) + 1}")

    def host(self, name: str) -> str:
        """The same for a host's full and its short name, in capitals and in small letters."""
        return self("host", name.lower() if _is_number(name) else name.lower().partition(".")[0])


def _is_number(host: str) -> bool:
    return host.replace(".", "").isdigit()


def redacted_environment(environment: Mapping[str, str], stand_in: StandIn) -> dict[str, str]:
    """Kept is what tunes a job and consists of numbers and known words; any other value is replaced."""
    return {
        name: value if _tunes(name, value) else stand_in("value", value)
        for name, value in environment.items()
    }


def _tunes(name: str, value: str) -> bool:
    if not _TUNING.fullmatch(name) or (_IDENTIFYING.fullmatch(name) and name not in _INTERFACES):
        return False
    return all(not word or _TECHNICAL_WORD.fullmatch(word) for word in re.split(r"[\s,;:=+^%|{}-]", value))


def host_names(diagnosis: Diagnosis, stand_ins: StandIns) -> dict[str, str]:
    """Every host under its full and its short name, in small letters."""
    hosts = [*diagnosis.job.hosts, *(rank.host for rank in diagnosis.ranks if rank.host)]
    hosts += [source_host(series.source) for series in diagnosis.telemetry]
    hosts += _addressed(diagnosis.job)
    found: dict[str, str] = {}
    for host in map(str.lower, hosts):
        short, _, domain = host.partition(".")
        if _is_number(host) or host == "localhost":
            continue
        found[host] = found[short] = stand_ins.host(host)
        if domain:
            found[domain] = "domain"
    return {name: stand_in for name, stand_in in found.items() if name not in own_words()}


def source_host(source: str) -> str:
    """The host in the source of a telemetry series, "node1 GPU 0", "node1 rank 3"."""
    return re.sub(r" (GPU|rank) \d+$", "", source)


def _addressed(job: Job) -> list[str]:
    """Hosts that arguments and variables name: they need not be among those that were recorded."""
    texts = [*job.command, *(value for name, value in job.environment.items() if not _tunes(name, value))]
    hosts = [host for text in texts for host in _HOST_PORT.findall(text)]
    hosts += [
        value
        for name in _HOST_VARIABLES
        if re.fullmatch(r"[A-Za-z][\w.-]+", value := job.environment.get(name, ""))
    ]
    return [host for host in hosts if host.lower() not in ("localhost", "nvcr.io", "docker.io")]


def user_names(diagnosis: Diagnosis, texts: Iterable[str], stand_in: StandIn) -> dict[str, str]:
    """Users by the environment, by folders in any text, and the one who analyses."""
    users = [diagnosis.job.environment.get(name, "") for name in _USER_VARIABLES]
    for text in texts:
        users += _HOME.findall(text) + _TILDE.findall(text)
    try:
        users.append(getpass.getuser())
    except (OSError, KeyError):
        pass  # an account without a name
    nobody = _NOBODY | own_words()
    known = dict.fromkeys(user.lower() for user in users if len(user) > 1)
    return {user: stand_in("user", user) for user in known if user not in nobody}


def redacted_command(
    command: list[str], root: str | None, stand_in: StandIn
) -> tuple[list[str], dict[str, str]]:
    """The program and its scripts stay (without their folders); every argument becomes a stand-in. Also what to replace
    elsewhere.
    """
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
            words.append(stand_in("argument", word))
            value = word.partition("=")[2] if word.startswith("-") else word
            if len(value) >= _LONG_VALUE:
                replaced[value] = stand_in("argument", word)
    return words, replaced


def hidden_values(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """The replaced values of variables that are long enough to be looked for in other texts."""
    return {
        value: after[name]
        for name, value in before.items()
        if after[name] != value and len(value) >= _LONG_VALUE and not _is_number(value)
    }


def replacer(names: Mapping[str, str], values: Mapping[str, str]) -> Callable[[str], str]:
    """Replaces whole words only, longest first, so that "node1" does not touch "node12".

    ``names`` in capitals and small letters, also beside a ``_``, and further hosts that are numbered like a known one.
    """
    pattern = _words(names, "A-Za-z0-9", re.IGNORECASE)
    exactly = _words(values, r"\w", 0)

    def replace(text: str) -> str:
        if exactly:
            text = exactly.sub(lambda found: values[found[0]], text)
        return pattern.sub(lambda found: names[found[0].lower()], text) if pattern else text

    return replace


def _words(names: Iterable[str], letters: str, flags: int) -> re.Pattern[str] | None:
    wanted = [name for name in names if name]
    if not wanted:
        return None
    return re.compile(rf"(?<![{letters}]){any_of(wanted)}(?![{letters}])", flags)


def unseen_hosts(texts: Iterable[str], names: Mapping[str, str], stand_ins: StandIns) -> dict[str, str]:
    """Hosts in ``texts`` that are numbered like one of ``names``, but took no part: node18 beside node17."""
    forms = {(found[1], len(found[2])) for name in names if (found := _NUMBERED.fullmatch(name))}
    forms = {
        (letters, digits) for letters, digits in forms if letters.strip("_-") not in own_words() or digits > 1
    }
    if not forms:
        return {}
    by_digits: dict[int, list[str]] = {}
    for letters, digits in sorted(forms):
        by_digits.setdefault(digits, []).append(letters)
    shapes = "|".join(rf"{any_of(letters)}\d{{{digits}}}" for digits, letters in by_digits.items())
    pattern = re.compile(rf"(?<![A-Za-z0-9])(?:{shapes})(?![A-Za-z0-9])", re.IGNORECASE)
    met = dict.fromkeys(word.lower() for text in texts for word in pattern.findall(text))
    return {name: stand_ins.host(name) for name in met if name not in names}


@cache
def own_words() -> frozenset[str]:
    """Words of ours that are also keys and terms: a host called "data" or a user called "train" cannot be taken out of them."""
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
