"""`penstock retain`: forget documents that are older than their collection keeps them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.frame import print_json, stderr
from penstock.cli.stopping import stops
from penstock.cli.stores import current_catalog, opened
from penstock.cli.tables import TableColumn, print_table, size_text
from penstock.errors import UserError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.model.spec import Catalog
    from penstock.retention import Retained

_COLUMNS: Final = (
    TableColumn("COLLECTION"),
    TableColumn("RETENTION"),
    TableColumn("DOCUMENTS", number=True),
    TableColumn("BYTES", number=True),
    TableColumn("JOURNALS", number=True),
    TableColumn("HELD", number=True),
)


def retain(
    settings: Settings,
    collection: Annotated[
        str | None,
        typer.Argument(
            help="One collection; all that have a retention by default.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be forgotten, and change nothing.")
    ] = False,
) -> None:
    """Forget documents that are older than their collection keeps them; readers and writers go on.

    A collection keeps its documents for `journals: {fragments: {retention: 30d}}` after they were
    committed, and for ever without it. What a task of the applied catalog has not read yet stays,
    as do transactions that are not closed: HELD is how many documents these are. The objects of
    what is forgotten are left to penstock gc.

    penstock up does the same every ten minutes.

    Example: penstock retain acme/orders --dry-run
    """
    done = stops.run(_retained(settings, collection, dry_run=dry_run))
    if settings.json:
        print_json({"dry_run": dry_run, "collections": [_as_json(each) for each in done]})
        return
    print_table(_COLUMNS, [_row(each) for each in done])
    for each in done:
        if each.reason is not None:
            stderr.print(each.reason, markup=False)
    documents, size = sum(e.documents for e in done), sum(e.bytes for e in done)
    if not done:
        stderr.print("no collection has a retention: every document is kept", markup=False)
    elif dry_run:
        stderr.print(f"would forget {documents:,} documents, {size_text(size)}", markup=False)


def _as_json(done: Retained) -> dict[str, Any]:
    return {**dataclasses.asdict(done), "reason": done.reason}


def _row(done: Retained) -> tuple[str, ...]:
    from penstock.runtime.diagnosis import duration_text

    return (
        done.collection,
        duration_text(done.retention_s),
        f"{done.documents:,}",
        size_text(done.bytes),
        str(done.journals),
        f"{done.held.documents if done.held else 0:,}",
    )


async def _retained(settings: Settings, collection: str | None, *, dry_run: bool) -> list[Retained]:
    from penstock import wall_clock
    from penstock.journal.blobs import open_blobs
    from penstock.journal.journals import Journals
    from penstock.journal.planning import Planner
    from penstock.journal.schemas import Schemas
    from penstock.retention import retain_collections

    async with opened(settings) as store:
        catalog = await current_catalog(store, settings)
        planner = Planner(
            journals=Journals(store), blobs=open_blobs(settings.blob), schemas=Schemas(store)
        )
        return await retain_collections(
            planner,
            catalog,
            now=wall_clock.now(),
            only=None if collection is None else _named(catalog, collection),
            dry_run=dry_run,
        )


def _named(catalog: Catalog, name: str) -> str:
    """Return the name of a collection that has a retention."""
    spec = catalog.collection(name)
    kept = [each.name for each in catalog.collections if each.fragments.retention_s]
    if spec is None or name not in kept:
        raise UserError(
            f"there is no collection {name}" if spec is None else f"{name} has no retention",
            why=None if spec is None else "its documents are kept for ever",
            fix=f"collections that have one: {', '.join(kept) or 'none'}"
            if spec is None
            else "write journals: {fragments: {retention: 30d}} under the collection, and apply it",
        )
    return name
