"""Puts a drawn program together from texts, and knows on which lines its faults stand."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from . import structures, support, texts

PLACE = re.compile(r"^(\s*)@\{(\w+)\}$")
WORD = re.compile(r"@\{(\w+)\}")
MARK = re.compile(r"\s*#@([\w-]+)$")

Lines = dict[str, list[tuple[str, int]]]


def fill(text: str, values: dict[str, str]) -> str:
    """``text`` with its places filled, whole blocks at the indentation of their place."""
    out = []
    for line in text.splitlines():
        place = PLACE.match(line)
        if place:
            block = fill(values.get(place[2], ""), values)
            out += [place[1] + each if each else each for each in block.splitlines()]
        else:
            out.append(WORD.sub(lambda word: values[word[1]], line))
    return "".join(f"{line}\n" for line in out)


def write(folder: Path, files: dict[str, str]) -> Lines:
    """Writes the files without their marks; returns the lines that each mark stood on."""
    lines: Lines = defaultdict(list)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        clean = []
        for number, line in enumerate(text.splitlines(), 1):
            mark = MARK.search(line)
            if mark:
                lines[mark[1]].append((name, number))
            clean.append(MARK.sub("", line))
        (folder / name).write_text("\n".join(clean) + "\n")
    return dict(lines)


def files_of(structure: str, model: str, data: str, values: dict[str, str]) -> dict[str, str]:
    """All files of one program, marks included."""
    parts = {"head": structures.HEAD, "tail": structures.TAIL, "setup": texts.SETUP, **values}
    core = texts.ACCUMULATED if int(values["parts"]) > 1 else texts.PLAIN
    parts["body"] = core
    parts["core"] = core.replace("@{before}\n", "").replace("@{after}\n", "")
    parts["core_before"] = core.replace("@{after}\n", "")
    files = {name: fill(text, parts) for name, text in structures.STRUCTURES[structure].items()}
    files["model.py"] = fill(texts.MODELS.get(model, texts.ACCELERATOR), parts)
    files["data.py"] = fill(texts.DATA[data], parts)
    files.update(
        {
            "switch.py": support.SWITCH,
            "times.py": support.TIMES,
            "neighbour.py": support.NEIGHBOUR,
            "start.py": support.START,
            "twin.py": support.TWIN,
        }
    )
    return files
