"""One case: mutated files, given to a command in a process of its own with limits, and what is wrong with its end, or with the charts of a
page that it wrote."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .kinds import KINDS
from .mutate import SECRET, mutate

MOST_S, MOST_CPU_S = 60, 6
"""Of a case: by the clock, on a machine with other work, and of the processor."""
MOST_BYTES = 500 << 20
"""More than the process had before."""
_SHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal would obey."""


@dataclass(frozen=True)
class Case:
    """Which case: the same numbers give the same files and command."""

    seed: int
    number: int
    only: tuple[str, ...]

    @property
    def again(self) -> str:
        """How to repeat it."""
        only = "".join(f" --only {name}" for name in self.only)
        return f"python -m tests.fuzz --seed {self.seed} --case {self.number}{only}"


def run_case(case: Case, seeds: Path, place: Path) -> None:
    """Make the files in ``place`` and run the command there; ends this process. For a child."""
    os.setsid()
    chance = random.Random(f"{case.seed}-{case.number}")
    kind = KINDS[chance.choice(case.only or tuple(KINDS))]
    shutil.copytree(seeds / kind.name, place / "in")
    secret = place / "secret"
    secret.write_text(f'{{"key": "{SECRET}"}}\n')
    files = sorted(file for pattern in kind.mutated for file in (place / "in").glob(pattern))
    said = []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        file = chance.choice(files)
        if file.is_file() and not file.is_symlink() and file.stat().st_size < 1 << 24:
            said.append(
                f"{file.relative_to(place / 'in')}: {mutate(file, chance, secret, fifos=not kind.named)}"
            )
    if kind.kept:
        seed = _contents(seeds / kind.name)
        own = ("train.py", "model.py")
        kept = {
            name: what
            for name, what in _contents(place / "in").items()
            if seed.get(name) != what or name.endswith(own)
        }
        (place / "kept").write_text(json.dumps(kept))
    command = chance.choice(kind.commands)
    (place / "case").write_text(f"{kind.name}\n{' '.join(command)}\n" + ascii("; ".join(said)) + "\n")
    os.chdir(place / "in")
    Path("out").mkdir()
    _limit()
    for number, name in ((0, os.devnull), (1, str(place / "stdout")), (2, str(place / "stderr"))):
        handle = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(handle, number)
    sys.argv = ["ddpdoctor", *command]
    from ddpdoctor.cli import main

    main()


def _limit() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 3 * MOST_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30,) * 2)
    spent = resource.getrusage(resource.RUSAGE_SELF)
    most_s = math.ceil(spent.ru_utime + spent.ru_stime) + MOST_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 1))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, MOST_S)


def start(case: Case, seeds: Path, place: Path) -> int:
    """The process id of a child that runs ``case`` in the new folder ``place``."""
    place.mkdir()
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        run_case(case, seeds, place)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def fault_of(place: Path, status: int, grown_bytes: int) -> str | None:
    """What is wrong with the end of the case that ran in ``place``, by its wait status and growth; None where nothing is."""
    if not (place / "case").exists():
        raise RuntimeError(f"{place.name}: the case could not be made")
    err, out = (_text(place / name) for name in ("stderr", "stdout"))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        ends = {
            signal.SIGALRM: f"no end within {MOST_S} s",
            signal.SIGXCPU: f"more than {MOST_CPU_S} s of processor time",
        }
        return ends.get(signal.Signals(number), f"killed by {signal.Signals(number).name}")
    code = os.waitstatus_to_exitcode(status)
    if "Traceback" in err:
        return f"a traceback: {_place_of(err)}"
    if "not enough memory" in err or grown_bytes > MOST_BYTES:
        return f"{grown_bytes >> 20} MB of memory"
    if _SHOWN.search(err) or _SHOWN.search(out):
        return "control characters on the terminal"
    sentences = [line for line in err.splitlines() if not line.startswith(("Note: ", "written: ", "steps "))]
    if code == 2 and not (len(sentences) == 1 and sentences[0].startswith("ddpdoctor: ")):
        return f"exit code 2 with other words than one sentence: {sentences[:3]}"
    if code == 0 and sentences:
        return f"words of no sentence of ours: {sentences[0][:100]}"
    # Tests of a rule that fail are a finding, too.
    if code not in (0, 2) and not (code == 1 and " failed" in out):
        return f"exit code {code}"
    now = _contents(place / "in") if (place / "kept").exists() else {}
    for name, what in json.loads(_text(place / "kept") or "{}").items():
        if now.get(name) != what:
            return f"{name}, which was not ddpdoctor's, was {'replaced' if name in now else 'removed'}"
    told = [file for file in (place / "in" / "out").rglob("*") if file.is_file()]
    if any(SECRET.encode() in text for text in (*(file.read_bytes() for file in told), (err + out).encode())):
        return "a file that a planted link leads to was read"
    pages = (fault_of_page(file.read_text(errors="replace")) for file in told if file.suffix == ".html")
    return next(filter(None, pages), None)


def _contents(folder: Path) -> dict[str, str]:
    """By the name of each file: a hash of its content, or else what it is."""
    return {
        str(file.relative_to(folder)): _what(file)
        if file.is_file() and not file.is_symlink()
        else str(stat.S_IFMT(file.lstat().st_mode))
        for file in folder.rglob("*")
        if file.is_symlink() or not file.is_dir()
    }


def _what(file: Path) -> str:
    with file.open("rb") as content:
        return f"{file.stat().st_size} {hashlib.sha256(content.read(1 << 20)).hexdigest()}"


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _place_of(err: str) -> str:
    """The last line of ours in a traceback, and the error."""
    ours = re.findall(r'File "[^"]*?/((?:ddpdoctor|tests)/[^"]+)", line (\d+)', err)
    last = next(
        (
            line
            for line in reversed(err.splitlines())
            if re.match(r"^[\w.]+(Error|Exception|Warning)?\b", line)
        ),
        "",
    )
    error = next(
        (line for line in err.splitlines() if re.match(r"^[\w.]*(Error|Exception|Overflow)\w*", line)), last
    )
    return f"{':'.join(ours[-1]) if ours else '?'} {error[:120]}"


def environment(place: Path) -> Mapping[str, str]:
    """What a case needs in its environment: one thread, a traceback where there is a defect, no cache of anybody's."""
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "POLARS_MAX_THREADS", "MKL_NUM_THREADS")
    return {
        **dict.fromkeys(threads, "1"),
        "DDPDOCTOR_TRACEBACK": "1",
        "XDG_CACHE_HOME": str(place),
        "NO_COLOR": "1",
    }


_NUMBERS = re.compile(r'\s(x|y|x1|x2|y1|y2|cx|cy|width|height|d|viewBox)="([^"]*)"')
_ODD = re.compile(r"nan|inf|none|e[+-]?\d", re.IGNORECASE)
_FIGURES = re.compile(r'<script type="text/plain" id="ddpdoctor-figures">([^<]*)</script>')
_LEAST, _MOST = 1e-250, 1e250
"""Between which a width in pixels can be divided by a number."""


def fault_of_page(page: str) -> str | None:
    """A sentence on the first chart that would not open; None where all do."""
    for name, value in _NUMBERS.findall(page):
        if _ODD.search(value):
            return f"a drawing with {name}={value[:60]!r}"
    packed = _FIGURES.search(page)
    if packed is None:
        return None
    figures = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return next(
        (f"figure {name}: {fault}" for name, spec in figures.items() for fault in faults_of_figure(spec)),
        None,
    )


def faults_of_figure(value: Any, key: str = "") -> Iterator[str]:
    """What of a figure, or of a part of one that is named ``key``, plotly cannot draw."""
    if isinstance(value, float | int):
        if not math.isfinite(value) or (value != 0 and not _LEAST < abs(value) < _MOST):
            yield f"{key} holds {value!r}"
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from faults_of_figure(inner, name)
    elif isinstance(value, list):
        if key == "range" and not value[0] < value[1]:
            yield f"range {value}"
        if key == "colorscale":
            if not _rises([edge for edge, _ in value]):
                yield f"colorscale {value}"
            return
        for inner in value:
            yield from faults_of_figure(inner, key)


def _rises(edges: list[float]) -> bool:
    return edges[0] == 0 and edges[-1] == 1 and edges == sorted(edges)
