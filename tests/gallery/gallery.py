"""What the gallery holds, its page, and outputs of commands in pages; needs neither a browser nor a recording."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from ddpdoctor.demo import JOB, find_fault

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDER = DOCS / "gallery"
MADE = FOLDER / "made.json"
"""What was made, when, with which versions; the page is written from it."""
PAGE = DOCS / "gallery.md"
TOUR = DOCS / "tour.md"
TEMPLATES = ROOT / "ddpdoctor" / "report" / "templates"
MOST_BYTES = 3_000_000
"""All files of the gallery together."""
FAULTS = {
    "slow-data-one-rank": "A slow loader on one rank",
    "slow-data": "Starved by the loader",
    "uneven-batch": "Uneven batches",
    "barrier": "A barrier in every step",
    "tiny-buckets": "Small buckets",
    "no-no-sync": "Gradients reduced too often",
    "gc": "A rank that collects garbage",
    "hang": "A hang",
    "healthy": "A healthy job",
}
"""Faults of the demo, in the order of the page, with their headings."""
EDITS = {
    "slow-data-one-rank": (
        "with `num_workers=5`",
        [("num_workers=0)", "num_workers=5, persistent_workers=True, prefetch_factor=4)")],
    ),
    "uneven-batch": (
        "with the samples in equal parts",
        [('BATCH_SIZE * 2 if fault == "uneven-batch" and rank == 1 else BATCH_SIZE', "BATCH_SIZE * 3 // 2")],
    ),
    "barrier": ("without the barrier", [("        dist.barrier()\n    elif", "    elif")]),
    "tiny-buckets": ("with DDP's own bucket size", [(", bucket_cap_mb=0.001)", ")")]),
    "no-no-sync": (
        "with `no_sync()`",
        [
            (
                "    for images, labels in batches:\n",
                "    for number, (images, labels) in enumerate(batches, 1):\n",
            ),
            (
                "        loss = loss_function(model(images), labels) / len(batches)\n        loss.backward()\n",
                "        with model.no_sync() if number < len(batches) else contextlib.nullcontext():\n"
                "            loss = loss_function(model(images), labels) / len(batches)\n            loss.backward()\n",
            ),
            ("import gc\n", "import contextlib\nimport gc\n"),
        ],
    ),
    "gc": (
        "with `gc.freeze()`",
        [("    batches = iter(loader)\n", "    batches = iter(loader)\n    gc.freeze()\n")],
    ),
}
"""The fix in the demo's script, in words and as texts to replace, by fault; jobs are recorded with it, too."""
FRONT = "slow-data-one-rank"
"""The report whose pictures README has."""
PICTURES = {
    "report-dark.webp": FRONT,
    "terminal.svg": FRONT,
    "watch.svg": FRONT,
    "compare.webp": FRONT,
    "dashboard.webp": FRONT,
    "history.webp": "barrier",
}
"""Further pictures, and the fault of the job that they show."""
HISTORY = ["healthy"] * 4 + ["barrier"] * 4
"""The jobs whose history is shown, one after the other: a test needs four runs before and after a change."""
PARTS = {
    "savings.webp": ("barrier", "savings"),
    "breakdown.webp": (FRONT, "breakdown"),
    "lateness.webp": (FRONT, "lateness"),
    "timeline.webp": (FRONT, "timeline"),
    "tried.webp": (FRONT, "tried"),
    "standing.webp": ("hang", "standing"),
}
"""Pictures of a part of a report: the fault, and the id of the part or of its heading."""
BLOCK = re.compile(r"(```console\n)(\$ [^\n]+\n)(.*?)(```)", re.DOTALL)
_PARAGRAPHS = re.compile(r"  # paragraphs (\d+) to (\d+)$")


def templates_digest() -> str:
    """A digest of all that draws a report, so that a test can tell whether pictures are older than it."""
    found = hashlib.sha256()
    for file in sorted(TEMPLATES.iterdir()):
        found.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()


def made() -> dict[str, Any]:
    """What :data:`MADE` says."""
    return json.loads(MADE.read_text(encoding="utf-8"))


def page(told: dict[str, Any]) -> str:
    """The gallery's page."""
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    parts = [
        "<!-- Written by `make gallery`; edit tests/gallery/gallery.py instead. -->\n\n# Gallery\n\n"
        "Eight faults and a healthy job, as their reports show them: real jobs of two CPU ranks, recorded by "
        "`ddpdoctor demo --fault NAME`, then redacted. A click on a picture opens the whole report (on GitHub, download the file and open "
        f"it). The reports are made with `--static`: without charts that zoom.\n\n"
        "What a fix gained is from one recording without it and one with it, one after the other, on a machine that may have been more or "
        "less busy in the second: it may lie outside the interval that the report gives.\n\n"
        f"Recorded on {told['made']} with {versions}."
    ]
    for name, report in told["reports"].items():
        rows = [f"**{report['verdict']}**"]
        rows += [report["cost"]] if report["cost"] else []
        rows += [f"What to change: {report['fix']}"] if report["fix"] else []
        rows += [report["gain"]] if report["gain"] else []
        parts.append(
            f"## {FAULTS[name]}\n\n`ddpdoctor demo --fault {name}`: {find_fault(name).description}\n\n"
            f"[![First screen of the report: {FAULTS[name]}](gallery/{name}.webp)](gallery/{name}.html)\n\n"
            + "\n\n".join(rows)
        )
    return "\n\n".join(parts) + "\n"


def fixed_script(name: str) -> str:
    """The demo's script with the fix of a fault."""
    text = JOB.read_text(encoding="utf-8")
    for old, new in EDITS[name][1]:
        assert text.count(old) == 1, (name, old)
        text = text.replace(old, new)
    return text


def refreshed(text: str) -> str:
    """``text``, a page, with the output of each console block's command as it is now; a comment "# paragraphs 1 to 3" chooses."""
    return BLOCK.sub(_with_output, text)


def _with_output(found: re.Match[str]) -> str:
    begin, command, _, end = found.groups()
    output = output_of(command)
    if chosen := _PARAGRAPHS.search(command.rstrip("\n")):
        output = "\n\n".join(output.strip("\n").split("\n\n")[int(chosen[1]) - 1 : int(chosen[2])]) + "\n"
    return begin + command + output + end


def output_of(command: str) -> str:
    """What a command of a page prints in the checkout, on a terminal of 80 columns."""
    words = command.removeprefix("$ ").partition("  #")[0].split()
    assert words[0] == "ddpdoctor", command
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "ddpdoctor", *words[1:]],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return re.sub(r" +$", "", done.stdout, flags=re.MULTILINE)
