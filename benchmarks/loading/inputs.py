"""What the loader is measured on: public traces, one of them blown up, and generated ranks."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "traces"
_TS = re.compile(r'"ts": ?([0-9.]+)')
_STEP = re.compile(r"ProfilerStep#(\d+)")
_ID = re.compile(r'"(?:correlation|External id|id)": (\d+)')
_COUNTED = re.compile(r'("(?:ts|correlation|External id|id)": |ProfilerStep#)(\d+)')
"""What differs between a trace's repetitions."""
_GAP_US = 1000.0


def blown_up(source: Path, target: Path, size_bytes: int) -> None:
    """Repeats the events of ``source``, each time later, until the JSON in ``target`` has ``size_bytes``."""
    text = gzip.decompress(source.read_bytes()).decode()
    top = json.loads(text)
    events = [event for event in top.pop("traceEvents") if event.get("ph") == "X"]
    first = min(event["ts"] for event in events)
    span_us = max(event["ts"] + event.get("dur", 0) for event in events) - first + _GAP_US
    start = text.index("[", text.index('"traceEvents"'))
    _, end = json.JSONDecoder().raw_decode(text, start)
    with gzip.open(target, "wt", compresslevel=6) as out:
        out.write(json.dumps(top, indent=2)[:-2] + ',\n  "traceEvents": [')
        written = repeats = 0
        while written < size_bytes:
            shift_us = repeats * span_us
            later = _TS.sub(
                lambda ts, by=shift_us: f'"ts": {float(ts[1]) + by:.3f}', text[start + 1 : end - 1]
            )
            written += out.write(("," if repeats else "") + later)
            repeats += 1
        out.write("]}")


def repeated(source: Path, target: Path, ranks: int, times: int) -> None:
    """Writes ``ranks`` traces of ``source``'s into ``target``, each with its events ``times`` times: later, with step marks and
    correlation ids of their own. More ranks than there are traces stand on further hosts."""
    target.mkdir()
    found = sorted(source.glob("*.json.gz"))
    texts = [gzip.decompress(file.read_bytes()).decode() for file in found]
    documents = [json.loads(text) for text in texts]
    events = [event for document in documents for event in document["traceEvents"] if event.get("ph") == "X"]
    first_us = min(event["ts"] for event in events)
    span_us = max(event["ts"] + event.get("dur", 0) for event in events) - first_us + int(_GAP_US)
    marks = sorted({int(number) for text in texts for number in _STEP.findall(text)})
    ids = 1 + max(int(number) for text in texts for number in _ID.findall(text))
    for rank in range(ranks):
        host, number = divmod(rank, len(found))
        document, text = documents[number], texts[number]
        head = {name: value for name, value in document.items() if name != "traceEvents"}
        head["distributedInfo"] = {
            **head["distributedInfo"],
            "rank": rank,
            "world_size": max(ranks, len(found)),
        }
        start = text.index("[", text.index('"traceEvents"'))
        _, end = json.JSONDecoder().raw_decode(text, start)
        once = _COUNTED.split(text[start + 1 : end - 1])
        shift = {"ts": span_us, "ProfilerStep#": marks[-1] - marks[0] + 1}
        by = [shift.get(name.strip('": '), ids) for name in once[1::3]]
        values = [int(value) for value in once[2::3]]
        place = target / found[number].name.replace(".", f"-{host}.", 1)
        with gzip.open(place, "wt", compresslevel=6) as out:
            out.write(json.dumps(head, indent=2)[:-2] + ',\n  "traceEvents": [')
            for time in range(times):
                once[2::3] = [str(value + time * step) for value, step in zip(values, by, strict=True)]
                out.write(("," if time else "") + "".join(once))
            out.write("]}")


def generated(ranks: int, folder: Path, steps: int) -> None:
    """Traces of a generated job on accelerators, eight ranks a host, one of them slow."""
    from tests.generator import Config, Plant, generate

    slow = Plant("slow_data", ranks=(3,), ms=4.0)
    generate(Config(world_size=ranks, hosts=(8,) * (ranks // 8), steps=steps, plants=(slow,)), folder)


def size_mb(path: Path) -> tuple[float, float]:
    """Size of a trace or of all traces in a folder on disk, and decompressed, MB."""
    files = [path] if path.is_file() else sorted(path.rglob("*.json*"))
    packed = sum(file.stat().st_size for file in files)
    plain = 0
    for file in files:
        opener = gzip.open if file.suffix == ".gz" else Path.open
        with opener(file, "rb") as stream:
            while block := stream.read(1 << 22):
                plain += len(block)
    return packed / 1e6, plain / 1e6
