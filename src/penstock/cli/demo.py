"""`penstock demo`: a catalog and its sample documents, reduced on Spark, in one command."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.init import write_template
from penstock.errors import UserError
from penstock.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.model.spec import Catalog, CollectionSpec

_ROWS_SHOWN = 10
_REFUSALS_SHOWN = 20
_WIDTH_OF_FILES = 200
"""Columns of a table that no terminal shows: nothing needs to be cut."""


def demo(
    settings: Settings,
    directory: Annotated[
        Path, typer.Argument(help="Where the demo's catalog is, or is to be made.", metavar="[DIR]")
    ] = Path("demo"),
) -> None:
    """Check the demo catalog, and reduce its sample documents by key on Spark.

    The catalog is written first if DIR has none. Change it or its data, and run it again.

    Example: penstock demo demo
    """
    from penstock.catalog.build import load_catalog
    from penstock.engine import EngineOptions, close_spark, open_spark

    main = directory / "catalog.yaml"
    if not main.exists():
        write_template(directory)
        stderr.print(f"wrote {main} and its sample data", markup=False)
    catalog = load_catalog([main], environ=os.environ)
    stderr.print(f"{main} is right", markup=False)
    with _step("starting Spark"):
        spark = open_spark(EngineOptions(master=settings.master, conf=settings.conf))
    results: dict[str, list[dict[str, object]]] = {}
    try:
        for collection, path in _samples(catalog, directory):
            with _step(f"reducing {path} by {', '.join(collection.key)}"):
                reduced, total = _reduce(spark, collection, path)
                keys = reduced.count()
                shown = reduced.orderBy(*_key_names(collection)).limit(_ROWS_SHOWN)
                rows = [row.asDict(recursive=True) for row in shown.collect()]
            results[collection.name] = rows
            if not settings.json:
                _print_table(collection, rows, total, keys)
    finally:
        close_spark()
    if settings.json:
        print_json(results)
        return
    stdout.print("Next:", markup=False)
    stdout.print(f"  look at {main}: each member says how it is reduced", markup=False)
    stdout.print(f"  penstock check --explain {main}    # the plan Spark runs", markup=False)
    stdout.print("  docs/ARCHITECTURE.md               # what Penstock is made of", markup=False)


def _samples(catalog: Catalog, directory: Path) -> Iterator[tuple[CollectionSpec, Path]]:
    """The collections that captures fill from files, each with its file."""
    for capture in catalog.captures:
        for binding in capture.bindings:
            collection = catalog.collection(binding.target) if binding.target else None
            path = directory / str(binding.resource.value.get("path", ""))
            if collection is not None and path.is_file():
                yield collection, path


def _reduce(spark: SparkSession, collection: CollectionSpec, path: Path) -> tuple[DataFrame, int]:
    """The documents of a file, one per key, and how many they were.

    What it returns is cached: it is counted, and a part of it is shown.
    """
    from pyspark.sql import functions as f

    from penstock.model.schema import CompiledSchema
    from penstock.native.plan import compile_reduction
    from penstock.native.reduce import flag_column, reduce_dataframe
    from penstock.native.validate import json_lines, read_json, refusals

    schema = CompiledSchema(collection.read_schema.value)
    read = read_json(json_lines(spark, str(path)), schema).cache()
    wrong = refusals(read).orderBy("file", "line").limit(_REFUSALS_SHOWN).collect()
    if wrong:
        raise UserError(
            "\n".join(f"{path}:{r['line']}: {r['pointer'] or '/'}: {r['message']}" for r in wrong),
            why=f"these documents do not fit the schema of {collection.name}",
            fix="correct them, or the schema",
        )
    plan = compile_reduction(schema, collection.key)
    documents = read.select("document.*", "line")
    reduced = reduce_dataframe(plan, documents, order=[f.col("line")], full=True)
    flag = flag_column(plan, full=True)
    return reduced.where(~f.col(flag)).drop(flag).cache(), read.count()


def _key_names(collection: CollectionSpec) -> list[str]:
    return [f"`{pointer[1:]}`" for pointer in collection.key]


def _print_table(
    collection: CollectionSpec, rows: list[dict[str, object]], total: int, keys: int
) -> None:
    """The key first, then the members that some row has."""
    key = [pointer[1:] for pointer in collection.key]
    used = [n for n in (rows[0] if rows else ()) if any(row[n] is not None for row in rows)]
    names = sorted(used, key=lambda name: name not in key)
    table = Table(title=f"{collection.name}: {total} documents, {keys} keys", title_justify="left")
    for name in names:
        numeric = all(isinstance(row[name], int | float | None) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*("" if row[name] is None else str(row[name]) for name in names))
    if keys > len(rows):
        table.caption = f"and {keys - len(rows)} more"
    console = stdout if stdout.is_terminal else Console(width=_WIDTH_OF_FILES, highlight=False)
    console.print(table)


@contextmanager
def _step(what: str) -> Iterator[None]:
    """Shows that something is going on, and how long it has taken."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=stderr, transient=True) as progress:
        progress.add_task(what)
        yield
