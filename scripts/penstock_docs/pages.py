"""Pages, their generated regions, and their blocks of code."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"

_REGION: Final = re.compile(
    r"^<!-- generated: (?P<what>.+?) -->\n(?P<body>.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL
)
_FENCE: Final = re.compile(r"^(?P<indent> *)```(?P<info>[^`]*)$")
_MARK: Final = re.compile(r"^ *<!-- (?P<mark>.+?) -->$")
_HEADING: Final = re.compile(r"^(?P<level>#+) (?P<text>.+)$", re.MULTILINE)


def pages() -> list[Path]:
    """Return every page for users: the front page, and all below docs/."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of code. `marks` are the comments right above it."""

    page: Path
    line: int
    """The line of its first line of code."""
    offset: int
    """Where its fence begins in the text of the page."""
    language: str
    file: str | None
    """The name of the file that it is, if it has one: ```yaml catalog.yaml"""
    text: str
    marks: tuple[str, ...]

    @property
    def place(self) -> str:
        return f"{_shown(self.page)}:{self.line}"

    def mark(self, name: str) -> str | None:
        """Return what a mark says: `with` of `<!-- with: shop.yaml -->` is `shop.yaml`."""
        found = [m.partition(": ")[2] for m in self.marks if m.partition(":")[0] == name]
        return found[0] if found else None


def blocks(page: Path, text: str | None = None) -> Iterator[Block]:
    """Yield the blocks of a page in order."""
    lines = (page.read_text(encoding="utf-8") if text is None else text).split("\n")
    marks: list[str] = []
    at, offset = 0, 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            mark = _MARK.match(lines[at])
            marks = [*marks, mark["mark"]] if mark else marks if not lines[at].strip() else []
            offset += len(lines[at]) + 1
            at += 1
            continue
        end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == "```")
        indent = len(fence["indent"])
        language, _, file = fence["info"].strip().partition(" ")
        code = lines[at + 1 : end]
        yield Block(
            page=page,
            line=at + 2,
            offset=offset,
            language=language,
            file=file or None,
            text="".join(line[indent:] + "\n" for line in code),
            marks=tuple(marks),
        )
        offset += sum(len(line) + 1 for line in lines[at : end + 1])
        marks, at = [], end + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A generated part of a page: what it is, and where."""

    what: str
    page: Path
    text: str
    """The text of the whole page."""
    offset: int
    body: str = ""
    """What is there now."""

    @property
    def place(self) -> str:
        line = self.text.count("\n", 0, self.offset) + 1
        return f"{_shown(self.page)}:{line}"

    @property
    def heading(self) -> str:
        """The heading that the region is below."""
        above = [h["text"] for h in _HEADING.finditer(self.text, 0, self.offset)]
        return above[-1] if above else ""

    def blocks_above(self) -> list[Block]:
        """Return the blocks between the heading and the region."""
        start = max((h.start() for h in _HEADING.finditer(self.text, 0, self.offset)), default=0)
        found = blocks(self.page, self.text)
        return [block for block in found if start <= block.offset < self.offset]


def regions(page: Path, text: str | None = None) -> list[Region]:
    """Return the generated regions of a page."""
    text = page.read_text(encoding="utf-8") if text is None else text
    return [
        Region(what=found["what"], page=page, text=text, offset=found.start(), body=found["body"])
        for found in _REGION.finditer(text)
    ]


def rendered(page: Path, generate: Callable[[Region], str]) -> str:
    """Return the text of a page with its regions generated anew."""
    text = page.read_text(encoding="utf-8")

    def region(found: re.Match[str]) -> str:
        start, body = found.start(), found["body"]
        what = Region(what=found["what"], page=page, text=text, offset=start, body=body)
        return f"<!-- generated: {found['what']} -->\n{generate(what).strip()}\n<!-- end -->"

    return _REGION.sub(region, text)


def _shown(page: Path) -> Path:
    return page.relative_to(ROOT) if page.is_relative_to(ROOT) else page


def headings(text: str) -> Iterator[tuple[int, str]]:
    """Yield the level and the text of each heading that is not inside of code."""
    code = False
    for line in text.split("\n"):
        code = code != line.lstrip().startswith("```")
        if not code and (found := _HEADING.match(line)):
            yield len(found["level"]), found["text"]


def anchor(heading: str) -> str:
    """Return the fragment of a heading's address, as GitHub makes it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table. Bars in cells are escaped, and line breaks become spaces."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")
