"""Print results as tables: one line per item, for people and for `grep`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from penstock.cli.frame import stdout

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_WIDE = 1 << 20


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A heading; numbers are aligned to the right."""

    name: str
    number: bool = False


def print_table(columns: Sequence[TableColumn], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under headings on stdout; nothing if there are none.

    A row is one line, however narrow the terminal, so that `grep` works.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.name, justify="right" if column.number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    if table.row_count:
        options = stdout.options.update(max_width=_WIDE)
        width = Measurement.get(stdout, options, table).maximum
        Console(width=width, highlight=False).print(table, crop=False)


def counted(count: int, what: str) -> str:
    """Write a number with what it counts: 1 document, 2,000 documents."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def size_text(size: int) -> str:
    """Format a number of bytes in a suitable unit."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{size} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"
