"""`penstock demo`: a catalog, its sample documents, and the resulting tables, in one command."""

from __future__ import annotations

import contextlib
import os
import sqlite3
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
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.api import Penstock
    from penstock.batch import TaskRun
    from penstock.model.spec import Catalog, CollectionSpec

_ROWS_SHOWN = 8
_WIDTH_OF_FILES = 200
"""Width of tables that are not shown in a terminal: nothing is cut."""


def demo(
    settings: Settings,
    directory: Annotated[
        Path, typer.Argument(help="Directory of the demo; created if missing.", metavar="DIR")
    ] = Path("demo"),
) -> None:
    """Run a small shop: sample documents go through collections into SQLite tables.

    The catalog is written first if DIR has none, and everything stays in DIR. Change the catalog,
    append documents, and run it again: it continues from where it was.

    Example: penstock demo demo
    """
    from penstock.catalog.build import load_catalog
    from penstock.engine import close_spark

    if not (directory / "catalog.yaml").exists():
        write_template(directory)
        stderr.print(f"wrote {directory / 'catalog.yaml'} and its sample data", markup=False)
    with contextlib.chdir(directory), _opened(settings) as penstock:
        catalog = load_catalog([Path("catalog.yaml")], environ=os.environ)
        penstock.apply("catalog.yaml")
        stderr.print("checked and applied the catalog", markup=False)
        for collection, path in _samples(catalog):
            _append(penstock, collection, path)
        try:
            with _step("running materializations on Spark"):
                runs = penstock.run()
        finally:
            close_spark()
        tables = {name: _rows(name) for name in _tables(catalog)}
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


def _samples(catalog: Catalog) -> Iterator[tuple[CollectionSpec, Path]]:
    """Yield the collections that have sample documents, each with its file."""
    for collection in catalog.collections:
        path = Path("data", f"{collection.name.rpartition('/')[2]}.jsonl")
        if collection.derivation is None and path.is_file():
            yield collection, path


def _append(penstock: Penstock, collection: CollectionSpec, path: Path) -> None:
    """Append the sample documents, once."""
    import json

    if penstock.journals(collection.name):
        stderr.print(f"{collection.name} already has its documents", markup=False)
        return
    with path.open() as lines:
        count = penstock.append(collection.name, (json.loads(line) for line in lines))
    stderr.print(f"appended {count} documents from {path} to {collection.name}", markup=False)


def _tables(catalog: Catalog) -> list[str]:
    return [
        str(binding.resource.value["table"])
        for spec in catalog.materializations
        for binding in spec.bindings
    ]


def _rows(table: str) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the columns and rows of a table in the demo's database."""
    with contextlib.closing(sqlite3.connect("shop.db")) as database:
        quoted = '"' + table.replace('"', '""') + '"'
        found = database.execute(f"SELECT * FROM {quoted} ORDER BY 1")  # noqa: S608 - quoted
        columns = [name for name, *_ in found.description if name != "flow_document"]
        names = [name for name, *_ in found.description]
        return columns, [dict(zip(names, row, strict=True)) for row in found]


def _print_table(name: str, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        return
    table = Table(title=f"{name}: {len(rows)} rows", title_justify="left")
    for column in columns:
        numeric = all(isinstance(row[column], int | float | None) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    for row in rows[:_ROWS_SHOWN]:
        table.add_row(*("" if row[column] is None else str(row[column]) for column in columns))
    if len(rows) > _ROWS_SHOWN:
        table.caption = f"and {len(rows) - _ROWS_SHOWN} more"
    console = stdout if stdout.is_terminal else Console(width=_WIDTH_OF_FILES, highlight=False)
    console.print(table)


def _print_next(directory: Path, runs: Sequence[TaskRun]) -> None:
    documents = sum(run.documents for run in runs)
    transactions = sum(run.transactions for run in runs)
    stdout.print(
        f"{documents} documents in {transactions} transactions"
        if transactions
        else "nothing new since the last run",
        markup=False,
    )
    stdout.print("\nNext:", markup=False)
    for command, why in (
        (f"cd {directory}", "everything is in here; the database is shop.db"),
        ("penstock append shop/stock data/stock.jsonl", "the same movements again"),
        ("penstock run", "sums grow, each document counted once"),
        ("penstock read ops/stats", "a document about each transaction"),
        ("penstock check --explain catalog.yaml", "the plan that Spark runs"),
    ):
        stdout.print(f"  {command:<46} # {why}", markup=False)


@contextmanager
def _step(what: str) -> Iterator[None]:
    """Show a spinner and the elapsed time."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=stderr, transient=True) as progress:
        progress.add_task(what)
        yield
