"""Findings about a catalog: what is wrong, where, and what to write instead.

Checking never stops at the first mistake: every phase reports here and continues with what it
understood, so one run shows everything. A code that begins with `E-` is an error, one with `W-` a
warning. Codes are stable, because people filter by them; messages may improve.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


class FilePosition(NamedTuple):
    """A place in a file; lines and columns count from one."""

    file: str
    line: int
    column: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnostic:
    """One finding. `pointer` leads to the value inside the file; "" is the whole file."""

    at: FilePosition
    pointer: str
    code: str
    message: str
    hint: str | None = None
    see: tuple[FilePosition, ...] = ()

    @property
    def is_error(self) -> bool:
        return self.code.startswith("E-")

    def render(self) -> str:
        """Render as `file:line:column: pointer: message [CODE]`, the hint, and other places."""
        place = ":".join(map(str, self.at))
        pointer = f" {self.pointer}:" if self.pointer else ""
        lines = [f"{place}:{pointer} {self.message} [{self.code}]"]
        if self.hint:
            first, *rest = self.hint.split("\n")
            lines += [f"  hint: {first}", *(f"        {line}".rstrip() for line in rest)]
        lines += [f"  see: {other.file}:{other.line}" for other in self.see]
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        return {
            "file": self.at.file,
            "line": self.at.line,
            "column": self.at.column,
            "pointer": self.pointer,
            "code": self.code,
            "severity": "error" if self.is_error else "warning",
            "message": self.message,
            "hint": self.hint,
            "see": [{"file": p.file, "line": p.line, "column": p.column} for p in self.see],
        }


class Diagnostics:
    """Collects findings, and iterates them sorted by place.

    A mistake in a shared file or behind an alias is found once per use, but is one mistake: a
    finding with the place, code and message of an earlier one is dropped.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[FilePosition, str, str], Diagnostic] = {}

    def report(self, diagnostic: Diagnostic) -> None:
        key = (diagnostic.at, diagnostic.code, diagnostic.message)
        self._found.setdefault(key, diagnostic)

    def __iter__(self) -> Iterator[Diagnostic]:
        return iter(sorted(self._found.values(), key=lambda d: (d.at, d.code, d.message)))

    @property
    def ok(self) -> bool:
        return not any(d.is_error for d in self._found.values())


def nearest(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Return the known words that may have been meant, closest first."""
    by_folded = {k.casefold(): k for k in known}
    close = difflib.get_close_matches(word.casefold(), by_folded, n=count, cutoff=0.6)
    return [by_folded[c] for c in close]


def did_you_mean(word: str, known: Iterable[str], otherwise: str | None = None) -> str | None:
    """Return the hint for an unknown word."""
    close = nearest(word, known)
    return f'did you mean "{close[0]}"?' if close else otherwise
