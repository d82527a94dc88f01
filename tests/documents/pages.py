"""Read Python blocks and command lines from the documentation."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INSTALLED = re.compile(r"^pip install -e '[^']+'( && )?")


def read(page: str) -> str:
    """Return the text of docs/<page>.md, or of a README: "README" or "<folder>/README"."""
    folder = ROOT if page.endswith("README") else ROOT / "docs"
    return (folder / f"{page}.md").read_text(encoding="utf-8")


def blocks(page: str, language: str = "python") -> list[str]:
    """Return the code blocks of a language, in order."""
    return [text for found, text in _BLOCK.findall(read(page)) if found == language]


def block_with(page: str, text: str) -> str:
    """Return the one Python block that contains a text."""
    (found,) = (block for block in blocks(page) if text in block)
    return found


def commands(page: str) -> list[str]:
    """Return the command lines, without installation, comments and Slurm scripts."""
    found = []
    for block in blocks(page, "bash"):
        if block.startswith("#!"):
            continue
        bare = re.sub(r"(?:^|\s+)# .*$", "", block, flags=re.MULTILINE).replace("\\\n", " ")
        lines = re.findall(r"""(?:"[^"]*"|'[^']*'|[^\n"'])+""", bare)  # quotes may span lines
        found += [_INSTALLED.sub("", line) for line in lines]
    return [line for line in found if line]
