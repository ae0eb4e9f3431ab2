"""Composes a random program from texts, and tracks the lines of its faults, which are inline or in a helper module."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from pathlib import Path

from . import structures, support, texts

PLACEHOLDER_LINE = re.compile(r"^(\s*)@\{(\w+)\}$")
PLACEHOLDER = re.compile(r"@\{(\w+)\}")
MARK = re.compile(r"\s*#@([\w-]+)$")

Lines = dict[str, list[tuple[str, int]]]


def fill(text: str, values: dict[str, str]) -> str:
    """``text`` with its placeholders replaced by ``values``. Blocks get the indentation of their placeholder."""
    out = []
    for line in text.splitlines():
        place = PLACEHOLDER_LINE.match(line)
        if place:
            block = fill(values.get(place[2], ""), values)
            out += [place[1] + each if each else each for each in block.splitlines()]
        else:
            out.append(PLACEHOLDER.sub(lambda word: values[word[1]], line))
    return "".join(f"{line}\n" for line in out)


def write(folder: Path, files: dict[str, str]) -> Lines:
    """Write the files without their marks. Returns the lines of each mark."""
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
    """All files of a program, with marks."""
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


SNIPPETS = {
    "loop": """\
total = 0
for i in range(int({amount})):  #@{key}
    total += (i * 7) % 13  #@{key}
""",
    "dumps": """\
for i in range(int({amount})):  #@{key}
    json.dumps({{"step": i, "values": [0.25, 0.5]}})  #@{key}
""",
    "sleep": """\
time.sleep({amount})  #@{key}
""",
    "products": """\
w = torch.eye(160)
for _ in range(int({amount})):  #@{key}
    w = w @ w  #@{key}
""",
    "reductions": """\
for _ in range(int({amount})):  #@{key}
    dist.all_reduce(torch.zeros(4))  #@{key}
""",
    "bytes": """\
size = int({amount})  #@{key}
if size:
    torch.save({{"state": torch.zeros(size // 4)}}, f"checkpoint-{{rank}}.pt")  #@{key}
""",
    "bytes together": """\
size = int({amount})  #@{key}
if size:
    if rank == 0:
        torch.save({{"state": torch.zeros(size // 4)}}, f"checkpoint-{{rank}}.pt")  #@{key}
    dist.barrier()  #@{key}
""",
    "average": """\
if {amount}:
    dist.all_reduce(loss.detach().clone())  #@{key}
""",
    "collect": """\
if {amount}:
    gc.collect()  #@{key}
""",
    "barrier": """\
if {amount}:
    dist.barrier()  #@{key}
""",
}
UNIT = {"barrier": "fixed", "average": "fixed", "bytes together": "bytes"}
HELPERS = ("metrics", "reporting", "bookkeeping", "checks")
NAMES = ("summarise", "to_numbers", "note", "inspect_batch")
HELPER_HEAD = "import gc\nimport json\nimport time\nimport torch\nimport torch.distributed as dist\n"


def plant(
    draw: random.Random, key: str, snippet: str, helpers: dict[str, str], in_helper: bool
) -> tuple[str, str]:
    """(Lines of the fault, import that they need). ``in_helper``: put the work into a helper module."""
    if not in_helper:
        return SNIPPETS[snippet].format(amount=f'amount("{key}")', key=key), ""
    module = draw.choice([name for name in HELPERS if f"{name}.py" not in helpers])
    name = draw.choice(NAMES)
    body = SNIPPETS[snippet].format(amount="size", key=key)
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    helpers[f"{module}.py"] = f"{HELPER_HEAD}\n\ndef {name}(size, rank=0):\n{indented}"
    return f'{module}.{name}(amount("{key}"))  #@{key}-call\n', f"import {module}\n"
