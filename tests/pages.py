"""The pages of the documentation, and the code blocks in them."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in a language."""
    return [code for found, code in BLOCK.findall(page.read_text("utf-8")) if found == language]


def run_python(page: Path) -> dict[str, Any]:
    """Run the Python blocks of a page, one after the other; returns the names that they define."""
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        exec(compile(block, f"a block of {page.name}", "exec"), names)
    return names
