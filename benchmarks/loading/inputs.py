"""What the loader is measured on: public traces, one of them blown up, and generated ranks."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "traces"
_TS = re.compile(r'"ts": ?([0-9.]+)')
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
