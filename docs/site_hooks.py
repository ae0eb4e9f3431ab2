"""What mkdocs does besides: lists the rules, which have a page each, in the navigation by family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

RULES = Path(__file__).parent / "rules"


def on_config(config: Any) -> Any:
    """Put the rules between "Understand" and "Reference"."""
    families: list[Any] = ["rules/index.md", "rules/fixes.md"]
    for family in sorted(folder for folder in RULES.iterdir() if folder.is_dir()):
        pages = sorted(family.glob("*.md"))
        families.append({family.name: [{page.stem: f"rules/{family.name}/{page.name}"} for page in pages]})
    config["nav"].insert(-2, {"Rules": families})
    return config
