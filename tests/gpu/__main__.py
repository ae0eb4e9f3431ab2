"""Run the jobs and print what was said of each.

python -m tests.gpu FOLDER [--budget SECONDS] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from .scenarios import SCENARIOS, run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--budget", type=float, default=3600.0)
    options = parser.parse_args()
    end = time.monotonic() + options.budget
    for name in options.names or [one.name for one in SCENARIOS]:
        scenario = next(one for one in SCENARIOS if one.name == name)
        if time.monotonic() > end:
            print("no time left for", name, flush=True)
            continue
        found = run(scenario, options.folder / name)
        for truth in found["truth"]:
            del truth["host_ms"], truth["losses"]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
