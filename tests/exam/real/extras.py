"""The lines that a fault adds to a program: inline, or in a helper that another module calls."""

from __future__ import annotations

import random

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
    draw: random.Random, key: str, snippet: str, helpers: dict[str, str], apart: bool
) -> tuple[str, str]:
    """The lines for the fault's place and the import they need; where ``apart``, the work stands in a helper's file."""
    if not apart:
        return SNIPPETS[snippet].format(amount=f'amount("{key}")', key=key), ""
    module = draw.choice([name for name in HELPERS if f"{name}.py" not in helpers])
    name = draw.choice(NAMES)
    body = SNIPPETS[snippet].format(amount="size", key=key)
    indented = "".join(f"    {line}\n" for line in body.splitlines())
    helpers[f"{module}.py"] = f"{HELPER_HEAD}\n\ndef {name}(size, rank=0):\n{indented}"
    return f'{module}.{name}(amount("{key}"))  #@{key}-call\n', f"import {module}\n"
