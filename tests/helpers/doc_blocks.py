"""The fenced code blocks of README.md and docs/, with what a comment before a block says about running it.

<!-- run -->                 before a `bash` block: its `vitfast` commands are run, not only parsed
<!-- not run: REASON -->     before a `python` block: it is compiled only
<!-- needs: LIBRARY -->      before a `python` block: it runs where that library is installed
<!-- output -->              before a `text` block: it is what the block of Python before it prints
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!-- (run|not run|needs|output)(?:: ([^>]*))? -->\s*\Z")


@dataclass
class Block:
    """One code block: its page, the line of its first line of code, its language, its code and what is to be done."""

    page: str
    line: int
    language: str
    code: str
    mark: str = ""
    reason: str = ""  # why it is not run, or which library it needs

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """The shell commands of a `bash` block: no comments, continued lines joined."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]


def blocks(page: str) -> list[Block]:
    """Those of one page, in their order."""
    source, found = (ROOT / page).read_text(), []
    for match in _BLOCK.finditer(source):
        mark = _COMMENT.search(source[: match.start()])
        line = source[: match.start(3)].count("\n") + 1
        code = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
        found.append(Block(page, line, match[2], code, *((mark[1], mark[2] or "") if mark else ())))
    return found
