"""Fenced blocks of the Markdown pages, and what the comment before a block says about running it.

<!-- not run: reason -->           the block is for reading
<!-- file: my.py -->               the block is the content of that file, for the blocks after it
<!-- run with: a -> b; c -> d -->  the test runs the block with these replacements, to be quick or to need no hub
"""

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "dev").rglob("*.md")),
)
_FENCE = re.compile(r"^```(\w*)\s*$")
_COMMENT = re.compile(r"^<!-- (not run|file|run with): (.+?) -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block: line number, language, text, and kind and value of the comment before it."""

    page: Path
    line: int
    language: str
    text: str
    kind: str = ""
    value: str = ""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def replaced(self) -> "Block":
        """The block with the replacements of its comment made; ValueError if one of them matches nothing."""
        if self.kind != "run with":
            return self
        text = self.text
        for pair in self.value.split("; "):
            old, new = pair.split(" -> ")
            if old not in text:
                raise ValueError(f"{self.where}: {old!r} of the comment is not in the block")
            text = text.replace(old, new)
        return replace(self, text=text)

    def commands(self) -> list[list[str]]:
        """The words of each line that begins with `$ `; a backslash at its end joins it with the next."""
        text = self.replaced().text.replace("\\\n", " ")
        return [shlex.split(line[2:], comments=True) for line in text.splitlines() if line.startswith("$ ")]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of `page`, in order."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    comment = ("", "")
    start: int | None = None
    language = ""
    for number, line in enumerate(lines, start=1):
        if start is None and (opening := _FENCE.match(line)):
            start, language = number, opening.group(1)
        elif start is not None and line == "```":
            text = "\n".join(lines[start : number - 1]) + "\n"
            found.append(Block(page, start + 1, language, text, *comment))
            start, comment = None, ("", "")
        elif start is None and line.strip():
            match = _COMMENT.match(line)
            comment = (match.group(1), match.group(2)) if match else ("", "")
    return found


def all_blocks(language: str) -> list[Block]:
    """The blocks of `language` on all pages."""
    return [block for page in PAGES for block in blocks(page) if block.language == language]
