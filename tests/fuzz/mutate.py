"""Mutations of one file: of its bytes, of the tokens of its JSON, of its words, and of what it is in the file system."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SECRET = "BEGIN-FUZZ-SECRET-KEY"
"""In the file to which planted links lead: it may not turn up in anything that is written."""

_DEEP = "[" * 100_000
_RAW = {"@huge": "1e999", "@deep": _DEEP, "@wide": "[" * 60 + "1" + "]" * 60, "@digits": "9" * 5000}
"""What no JSON library writes, by the text that stands for it until the document is written."""
_PIECES = (
    "y",
    "_a.",
    "`",
    "``a ",
    "\u00a0 ",
    "é_",
    "/a b",
    "'/",
    "x\n\n",
    "<",
    "0",
    ".0",
    "1.2.3.4 ",
    "a@",
    "\x1b",
    "&",
)
_ALONE = (
    f"1.{'0' * 250_000}1 ms",
    f"http://{'.' * 250_000}x",
    " ".join(f"/home/u{n}x" for n in range(15_000)),
)
_LONG = (*(piece * (length // len(piece)) for piece in _PIECES for length in (250_000, 1_000_000)), *_ALONE)
"""Of which each piece asks something of who looks for words, paths, markup or numbers: what looks back for each, never ends."""
_LONG_SHARE, _THROUGHOUT_SHARE = 0.1, 0.35
_MOST_TEXTS = 8
"""That become long together."""
_SCALES = (0.0, 5e-324, 1e-320, 1e-310, 1e-150, 1e15, -1.0)
_MOST_ENTRIES, _MOST_BYTES = 100_000, 20_000_000
"""Of a list that is repeated."""
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 5, 0.5, -0.0, 5e-324, 1e-320, 1e-99, 1e18, 1e300, 1e308),
    *(2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**12, 10**30, -(2**63), -(2**64)),
    *(float("nan"), float("inf"), float("-inf"), "@huge", "@deep", "@wide", "@digits"),
    *("", "x", "0", "../../../etc/passwd", "/dev/zero", "\x00", "\ud800", "a\nb", "[red]x[/red]"),
    *("NaN", "Infinity", "-Infinity", "1e308"),
    *(
        "\x1b[2J\x1b]52;c;Zm9v\x07",
        "\x9b31m",
        "\u202egnp.exe",
        "</script><img src=x>",
        "=1+1",
        "é" * 3,
        "y" * 70_000,
    ),
    *([], {}, [[]], [5], [1, 2, 3], [None], {"a": []}, [{}], {"": 1}, [["x", 1]], ["\x1b[31m"]),
)


def mutate(path: Path, chance: random.Random, secret: Path, *, fifos: bool = True) -> str:
    """Change the file ``path``; what was done, in words."""
    if chance.random() < 0.08:
        return _replace(path, chance, secret, fifos)
    name = path.name
    inside = chance.random() < 0.85
    if inside and path.read_bytes().startswith(b"\x1f\x8b"):
        try:
            changed, said = _content(gzip.decompress(path.read_bytes()), name.removesuffix(".gz"), chance)
        except (OSError, EOFError, zlib.error):
            changed, said = _bytes(path.read_bytes(), chance)
        else:
            changed = gzip.compress(changed, 1)
    elif inside and name.endswith(".columns") and zipfile.is_zipfile(path):
        return _in_archive(path, chance)
    elif inside and name.endswith(".parquet"):
        changed, said = _table(path.read_bytes(), chance)
    else:
        changed, said = _content(path.read_bytes(), name, chance)
    path.write_bytes(changed)
    return said


def _content(data: bytes, name: str, chance: random.Random) -> tuple[bytes, str]:
    if chance.random() < 0.15 or name.endswith((".gz", ".columns", ".parquet")):
        return _bytes(data, chance)
    if name.endswith((".json", ".jsonl")):
        return _json(data, name.endswith(".jsonl"), chance)
    return _words(data, chance)


def _bytes(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    where = chance.randrange(len(data) + 1)
    kind = chance.randrange(6)
    if kind == 0:
        return data[:where], f"cut at byte {where}"
    if kind == 1:
        return data[:where] + chance.randbytes(chance.randrange(1, 9)) + data[
            where:
        ], f"bytes put in at {where}"
    if kind == 2:
        return b"\xef\xbb\xbf" + data, "byte order mark"
    if kind == 3:
        return data + data[where:], f"repeated from byte {where}"
    if kind == 4:
        return data[:where] + b"\0" * 64 + data[where:], f"NUL at {where}"
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 20)) if data else 0):
        changed[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(changed), "bytes replaced"


def _json(data: bytes, lines: bool, chance: random.Random) -> tuple[bytes, str]:
    """One or some places of a document, or of some lines, get values that nobody expects there."""
    texts = data.decode(errors="replace").split("\n") if lines else [data.decode(errors="replace")]
    chosen = [i for i, text in enumerate(texts) if text]
    if not chosen:
        return data, "nothing"
    many = lines and chance.random() < 0.3
    rows = chosen if many else [chance.choice(chosen) for _ in range(chance.choice((1, 1, 2, 4)))]
    said, seed = "", chance.random()
    for row in rows:
        # All lines are changed alike: a whole column of a file is odd then.
        own = random.Random(seed) if many else chance
        try:
            document = json.loads(texts[row])
        except (ValueError, RecursionError):
            continue
        document, said = _document(document, own)
        texts[row] = _written(document)
    if lines and chance.random() < 0.1:
        texts.insert(chance.choice(chosen), chance.choice(texts))
    return "\n".join(texts).encode("utf-8", "surrogatepass"), said + (" in all lines" if many else "")


def _document(document: Any, chance: random.Random) -> tuple[Any, str]:
    if isinstance(document, dict) and chance.random() < _THROUGHOUT_SHARE:
        return document, _throughout(document, chance)
    holder, key, path = {"": document}, "", ""
    inside: Any = document
    while (
        isinstance(inside, (dict, list))
        and inside
        and chance.random() < (0.97 if holder is None or path == "" else 0.75)
    ):
        key = chance.choice(list(inside)) if isinstance(inside, dict) else chance.randrange(len(inside))
        holder, path = inside, f"{path}.{key}"
        inside = inside[key]
    kind = chance.randrange(8)
    if kind == 0 and path:
        del holder[key]
        return document, f"{path} removed"
    if kind == 1 and isinstance(inside, list) and inside:
        most = min(_MOST_ENTRIES // len(inside), _MOST_BYTES // len(json.dumps(inside)))
        inside.extend(list(inside) * min(chance.choice((1, 30, most)), most))
        return document, f"{path} repeated"
    if kind == 2 and isinstance(inside, dict):
        inside[chance.choice(("t", "ev", "step", "rank", "notes", "\x1b[1m", "schema", ""))] = _value(chance)
        return document, f"{path} with another key"
    if kind == 3 and type(inside) in (int, float):
        changed = chance.choice(
            (-inside, inside + 10**12, inside * 1000, inside * 10**9, inside - 10**18, inside * 1.0)
        )
        holder[key] = changed
        return document if path else changed, f"{path} = {changed!r}"
    value = _value(chance)
    if not path:
        return value, f"all is {value!r}"[:60]
    holder[key] = value
    return document, f"{path} = {value!r}"[:80]


def _value(chance: random.Random) -> Any:
    return chance.choice(_LONG if chance.random() < _LONG_SHARE else _VALUES)


def _throughout(document: dict[str, Any], chance: random.Random) -> str:
    """Much of a document at once: what one place alone does not show."""
    parts = [part for part in document.values() if isinstance(part, (dict, list))]
    if chance.random() < 0.5 and parts:
        factor = chance.choice(_SCALES)
        for part in parts if chance.random() < 0.5 else [chance.choice(parts)]:
            _scale(part, factor)
        return f"numbers times {factor}"
    long = chance.choice(_LONG)[:250_000]
    found = [texts for part in parts if (texts := list(_texts(part)))]
    for _ in range(_MOST_TEXTS if found else 0):
        # Where there are few texts, each is read by everybody: a headline, a note.
        (texts,) = chance.choices(found, [1 / len(texts) for texts in found])
        holder, key = chance.choice(texts)
        holder[key] = long
    return f"texts become {long[:20]!r} ..."


def _texts(value: dict[Any, Any] | list[Any]) -> Iterator[tuple[Any, Any]]:
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(item, (dict, list)):
            yield from _texts(item)
        elif isinstance(item, str):
            yield value, key


def _scale(value: dict[Any, Any] | list[Any], factor: float) -> None:
    """All floats of ``value``, however nested, become smaller or larger alike: a whole chart's, where one alone would not show."""
    for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(item, (dict, list)):
            _scale(item, factor)
        elif isinstance(item, float):
            value[key] = item * factor


def _written(document: Any) -> str:
    text = json.dumps(document)
    for stand_in, raw in _RAW.items():
        text = text.replace(f'"{stand_in}"', raw)
    return text


def _words(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """A word or number of a text (TOML, YAML, HTML) becomes something else."""
    text = data.decode(errors="replace")
    words = list(re.finditer(r"[\w.-]+|[\[\]{}:\"'&*!|>=-]", text))
    if not words:
        return data, "nothing"
    word = chance.choice(words)
    value = _value(chance)
    new = value if isinstance(value, str) else _written(value)
    new = chance.choice(
        (
            new,
            "",
            word.group() * 2,
            chance.choice(words).group(),
            "*a",
            "&a [*a]",
            "!!python/object:os.system",
        )
    )
    new = _RAW.get(new, new)
    changed = text[: word.start()] + new + text[word.end() :]
    return changed.encode("utf-8", "surrogatepass"), f"{word.group()[:30]!r} becomes {new[:30]!r}"


def _in_archive(path: Path, chance: random.Random) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError):
        path.write_bytes(b"PK")
        return "no archive any more"
    name = chance.choice(sorted(members))
    change: Callable[..., tuple[bytes, str]] = _table if name.endswith(".parquet") else _content
    members[name], said = change(members[name], *(() if change is _table else (name,)), chance)
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    return f"{name}: {said}"


def _table(data: bytes, chance: random.Random) -> tuple[bytes, str]:
    """A column of a Parquet table is lost, of another type, or holds values out of range."""
    import polars as pl

    try:
        frame = pl.read_parquet(io.BytesIO(data))
    except pl.exceptions.PolarsError:
        return _bytes(data, chance)
    name = chance.choice(frame.columns)
    kind = chance.randrange(5)
    if kind == 0:
        frame = frame.drop(name)
    elif kind == 1:
        values = chance.choice((None, "x", float("nan"), float("inf"), -1, 2**62, [1], True))
        frame = frame.with_columns(pl.lit(values).alias(name))
    elif kind == 2:
        frame = frame.head(chance.randrange(frame.height + 1))
    elif kind == 3:
        frame = pl.concat([frame] * 3)
    elif frame.height:
        values = frame[name].to_list()
        for _ in range(chance.choice((1, 5))):
            values[chance.randrange(len(values))] = chance.choice(
                (None, -1, 2**31 - 1, -(2**31), 2**62, 10**12)
            )
        try:
            frame = frame.with_columns(pl.Series(name, values, strict=False))
        except (pl.exceptions.PolarsError, TypeError, OverflowError):
            return _bytes(data, chance)
    packed = io.BytesIO()
    frame.write_parquet(packed)
    return packed.getvalue(), f"column {name}, kind {kind}"


def _replace(path: Path, chance: random.Random, secret: Path, fifos: bool) -> str:
    """Something else stands in the file's place, or in the place of its folder."""
    kind = chance.choice(
        (
            "fifo",
            "link",
            "loop",
            "device",
            "folder",
            "empty",
            "gone",
            "sparse",
            "locked",
            "linked folder",
            "swap",
        )
    )
    if kind == "fifo" and not fifos:
        kind = "gone"
    if kind == "linked folder":
        folder = path.parent
        elsewhere = secret.parent / f"elsewhere-{len(list(secret.parent.iterdir()))}"
        shutil.move(folder, elsewhere)
        folder.symlink_to(elsewhere)
        return "the folder is a link"
    if kind == "swap":
        others = sorted(file for file in path.parent.rglob("*") if file.is_file() and file != path)
        if others:
            shutil.copy(chance.choice(others), path)
        return "another file"
    if kind == "locked":
        path.chmod(0)
        return kind
    if kind == "sparse":
        os.truncate(path, 1 << 40)
        return kind
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    elif kind != "gone":
        path.symlink_to({"link": secret, "loop": path, "device": "/dev/zero"}[kind])
    return kind
