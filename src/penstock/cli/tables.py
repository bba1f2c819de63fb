"""Print results as tables: one line per item, for people and for `grep`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.frame import stderr, stdout

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_GAP = 2


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A heading; numbers are aligned to the right."""

    name: str
    number: bool = False


def print_table(columns: Sequence[TableColumn], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under headings on stdout; nothing if there are none.

    A row is one line, so that `grep` works, and nothing in it is cut. On a terminal, the last
    columns are left out if they do not fit, and named.
    """
    found = list(rows)
    if not found:
        return
    widths = [
        max(len(column.name), *(cell_len(row[at]) for row in found))
        for at, column in enumerate(columns)
    ]
    count = fitting(widths, stdout.width) if stdout.is_terminal else len(columns)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns[:count]:
        table.add_column(column.name, justify="right" if column.number else "left", no_wrap=True)
    for row in found:
        table.add_row(*map(Text, row[:count]))
    width = max(sum(widths[:count]) + _GAP * (count - 1), 1)
    Console(width=width, highlight=False).print(table, crop=False)
    if left_out := ", ".join(column.name for column in columns[count:]):
        stderr.print(f"(no room for {left_out}; --json has everything)", markup=False)


def fitting(widths: Sequence[int], room: int) -> int:
    """Return how many columns fit, from the first on, which always does."""
    sums = accumulate(width + _GAP for width in widths)
    return max(sum(each - _GAP <= room for each in sums), 1)


def counted(count: int, what: str) -> str:
    """Write a number with what it counts: 1 document, 2,000 documents."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def size_text(size: int) -> str:
    """Format a number of bytes in a suitable unit."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{size} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"
