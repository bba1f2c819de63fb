"""`penstock demo`: a catalog, its sample files, and the resulting tables, in one command."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.init import write_template
from penstock.cli.tables import counted
from penstock.servicekit import logs
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.api import Penstock
    from penstock.batch import TaskRun
    from penstock.model.spec import Catalog

_ROWS_SHOWN = 8
_WIDTH_OF_FILES = 200
"""Width of tables that are not shown in a terminal: nothing is cut."""


def demo(
    settings: Settings,
    directory: Annotated[
        Path, typer.Argument(help="Directory of the demo; created if missing.", metavar="DIR")
    ] = Path("demo"),
) -> None:
    """Run a small shop: capture files into collections, derive one, and fill SQLite tables.

    Writes the catalog first if DIR has none, and keeps everything in DIR. Change the catalog, add
    files, and run it again: it continues where it was.

    Example: penstock demo demo
    """
    from penstock.catalog.build import load_catalog
    from penstock.engine import close_spark

    if not (directory / "catalog.yaml").exists():
        write_template(directory)
        stderr.print(f"wrote {directory / 'catalog.yaml'} and its sample data", markup=False)
    with contextlib.chdir(directory), _opened(settings) as penstock:
        catalog = load_catalog([Path("catalog.yaml")], environ=os.environ)
        penstock.apply("catalog.yaml", remove=True)
        stderr.print("checked and applied the catalog", markup=False)
        try:
            with _step(settings, "starting Spark; running captures, derivations, materializations"):
                runs = penstock.run()
        finally:
            close_spark()
        for line in _steps(catalog, runs):
            stderr.print(line, markup=False)
        tables = {name: _rows(name, keys) for name, keys in _tables(catalog).items()}
    if settings.json:
        print_json({name: rows for name, (_, rows) in tables.items()})
        return
    for name, (columns, rows) in tables.items():
        _print_table(name, columns, rows)
    _print_next(directory, runs)


@contextmanager
def _opened(settings: Settings) -> Iterator[Penstock]:
    import penstock

    with penstock.open(data=".penstock", master=settings.master, conf=settings.conf) as opened:
        yield opened


def _steps(catalog: Catalog, runs: Sequence[TaskRun]) -> Iterator[str]:
    """Say what each task did, in the order of the catalog's picture."""
    by_name = {run.task: run for run in runs}
    for kind, names in (
        ("captured", [spec.name for spec in catalog.captures]),
        ("derived", [spec.name for spec in catalog.derivations]),
        ("stored", [spec.name for spec in catalog.materializations]),
    ):
        for run in (by_name[name] for name in names if name in by_name):
            if not run.transactions:
                yield f"{run.task}: nothing new"
                continue
            yield (
                f"{run.task}: read {counted(run.documents, 'document')}, {kind} {run.stored:,}, in "
                f"{counted(run.transactions, 'transaction')}, "
                f"{counted(run.jobs, 'Spark job')}, {run.seconds:.1f} s"
            )


def _tables(catalog: Catalog) -> dict[str, list[str]]:
    """Return the tables, each with the columns of its key."""
    keys = {spec.name: [at.removeprefix("/") for at in spec.key] for spec in catalog.collections}
    return {
        str(binding.resource.value["table"]): keys[binding.source.collection]
        for spec in catalog.materializations
        for binding in spec.bindings
    }


def _rows(table: str, keys: Sequence[str]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the columns, the key first, and the rows of a table in the demo's database."""
    with contextlib.closing(sqlite3.connect("shop.db")) as database:
        quoted = '"' + table.replace('"', '""') + '"'
        found = database.execute(f"SELECT * FROM {quoted} ORDER BY 1")  # noqa: S608 - quoted
        names = [name for name, *_ in found.description]
        columns = sorted(
            set(names) - {"flow_document"}, key=lambda n: (n not in keys, names.index(n))
        )
        return columns, [dict(zip(names, row, strict=True)) for row in found]


def _print_table(name: str, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    title = f"{name}: {counted(len(rows), 'row')}"
    if not rows:
        stdout.print(title, markup=False)
        return
    console = stdout if stdout.is_terminal else Console(width=_WIDTH_OF_FILES, highlight=False)
    shown = {column: [_text(row[column]) for row in rows[:_ROWS_SHOWN]] for column in columns}
    fitting = _fitting(shown, console.width)
    table = Table(title=title, title_justify="left")
    for column in fitting:
        numeric = all(isinstance(row[column], int | float | None) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    for row in zip(*(shown[column] for column in fitting), strict=True):
        table.add_row(*row)
    notes = [f"{len(rows) - _ROWS_SHOWN} more rows"] if len(rows) > _ROWS_SHOWN else []
    notes += [f"not shown: {column}" for column in columns if column not in fitting]
    if notes:
        table.caption = ", ".join(notes)
    console.print(table)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _fitting(shown: dict[str, list[str]], width: int) -> list[str]:
    """Choose the columns that fit, from the first on: none is cut, and the key is there."""
    left = width - 1
    fitting: list[str] = []
    for column, texts in shown.items():
        left -= max(len(column), *map(len, texts)) + 3
        if left < 0 and fitting:
            break
        fitting.append(column)
    return fitting


def _print_next(directory: Path, runs: Sequence[TaskRun]) -> None:
    documents = sum(run.documents for run in runs)
    transactions = sum(run.transactions for run in runs)
    stdout.print(
        f"{counted(documents, 'document')} in {counted(transactions, 'transaction')}"
        if transactions
        else "nothing new since the last run",
        markup=False,
    )
    stdout.print("\nNext:", markup=False)
    for command, why in (
        (f"cd {directory}", "the tables are in shop.db"),
        ("cp data/stock.jsonl data/stock-2.jsonl", "a second file of movements"),
        ("penstock run", "sums grow; each document counts once"),
        ("penstock up", "keep running; stop with Ctrl-C"),
        ("penstock read ops/stats", "one document per transaction"),
        ("penstock check --explain", "how documents are reduced"),
    ):
        stdout.print(f"  {command:<38} # {why}", markup=False)


@contextmanager
def _step(settings: Settings, what: str) -> Iterator[None]:
    """Show a spinner and the elapsed time; on a terminal, of the log only errors, above it."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=stderr, transient=True) as progress:
        progress.add_task(what)
        if not stderr.is_terminal:
            yield
            return
        level = "debug" if settings.debug else "error"
        logs.configure(level=level, as_json=settings.log_json, stream=sys.stderr)  # Progress's, now
        try:
            yield
        finally:
            logs.configure(
                level=settings.log_level, as_json=settings.log_json, stream=sys.__stderr__
            )
