"""`penstock demo`: a catalog, its sample files, and the resulting tables, in one command."""

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
from penstock.cli.tables import counted
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
    """Run a small shop: files are captured, and go through collections into SQLite tables.

    The catalog is written first if DIR has none, and everything stays in DIR. Change the catalog,
    add files, and run it again: it continues from where it was.

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
            with _step("running captures, derivations and materializations"):
                runs = penstock.run()
        finally:
            close_spark()
        for line in _steps(catalog, runs):
            stderr.print(line, markup=False)
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
    table = Table(title=f"{name}: {counted(len(rows), 'row')}", title_justify="left")
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
        f"{counted(documents, 'document')} in {counted(transactions, 'transaction')}"
        if transactions
        else "nothing new since the last run",
        markup=False,
    )
    stdout.print("\nNext:", markup=False)
    for command, why in (
        (f"cd {directory}", "everything is in here; the database is shop.db"),
        ("cp data/stock.jsonl data/stock-2.jsonl", "a new file, of the same movements"),
        ("penstock run", "sums grow, each document counted once"),
        ("penstock up", "everything, on and on, with a table of what runs; Ctrl-C ends it"),
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
