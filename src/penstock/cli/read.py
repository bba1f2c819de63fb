"""`penstock read`: the documents of a collection as JSON lines."""

from __future__ import annotations

import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.stopping import stops
from penstock.cli.stores import current_catalog, opened
from penstock.cli.tables import counted
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.consensus.store import Consensus
    from penstock.journal.journals import Journals
    from penstock.journal.selector import LabelSelector


def read(
    settings: Settings,
    collection: Annotated[str, typer.Argument(help="Name of the collection.", show_default=False)],
    start: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            help="Start at a publish time (2026-01-31T08:00:00Z), or at a commit (revision=N, "
            "offset=N or JOURNAL@N); repeatable.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep following new commits; stop with Ctrl-C.")
    ] = False,
    uncommitted: Annotated[
        bool,
        typer.Option(
            "--uncommitted",
            help="Print everything as it was written, with UUIDs: also uncommitted, rolled back "
            "and duplicate documents.",
        ),
    ] = False,
    selector: Annotated[
        str,
        typer.Option(
            "--selector", "-l", help="Select journals by label: region=eu, region in (eu, us)."
        ),
    ] = "",
    limit: Annotated[
        int | None, typer.Option("--limit", min=0, help="Stop after N documents.")
    ] = None,
    with_meta: Annotated[
        bool, typer.Option("--with-meta", help="Include the UUID of each document, at /_meta/uuid.")
    ] = False,
) -> None:
    """Print the committed documents of a collection as JSON lines.

    Documents come journal by journal, in commit order. A transaction is visible in all of its
    journals or in none.

    Example: penstock read acme/orders --from 2026-01-31T08:00:00Z --limit 10
    """
    stops.run(
        _read(
            settings,
            collection,
            start or [],
            follow=follow,
            uncommitted=uncommitted,
            selector=selector,
            limit=limit,
            uuid=with_meta or uncommitted,
        )
    )


async def _read(
    settings: Settings,
    collection: str,
    start: list[str],
    *,
    follow: bool,
    uncommitted: bool,
    selector: str,
    limit: int | None,
    uuid: bool,
) -> None:
    from penstock.journal.blobs import open_blobs
    from penstock.journal.journals import Journals
    from penstock.journal.reader import CollectionReader, Start
    from penstock.journal.rows import to_lines
    from penstock.journal.schemas import Schemas
    from penstock.journal.selector import LabelSelector

    begin, selected = Start.parse(start), LabelSelector.parse(selector)
    async with opened(settings, create=bool(settings.catalog)) as store:
        journals = Journals(store)
        await _check_known(store, journals, collection, settings, selected)
        reader = CollectionReader(
            journals,
            open_blobs(settings.blob),
            Schemas(store),
            collection,
            start=begin,
            selector=selected,
            uncommitted=uncommitted,
        )
        left = most = sys.maxsize if limit is None else min(limit, sys.maxsize)
        async with aclosing(reader.follow() if follow else reader.read()) as found:
            while left > 0 and (rows := await anext(found, None)) is not None:
                batch = rows.batch.slice(0, left)
                left -= batch.num_rows
                _print(to_lines(batch, rows.root, uuid=uuid))
                stops.outcome = f"{counted(most - left, 'document')} printed"


def _print(lines: list[str]) -> None:
    """Write whole lines at once, and flush: the reader of a pipe sees them, or has gone."""
    out = sys.stdout.buffer
    out.write("".join([line + "\n" for line in lines]).encode())
    out.flush()


async def _check_known(
    store: Consensus,
    journals: Journals,
    collection: str,
    settings: Settings,
    selector: LabelSelector,
) -> None:
    """Raise if no catalog and no journal knows the collection, or a label of the selector.

    A collection without documents is empty.
    """
    from penstock.catalog.collection_lookup import unknown_collection
    from penstock.catalog.desired import NothingApplied

    try:
        specs = {spec.name: spec for spec in (await current_catalog(store, settings)).collections}
    except NothingApplied:
        specs = {}
    if collection in specs and not selector.requirements:
        return
    known, found = set(specs), await journals.list(collection)
    if collection in known or found:
        labels = {name for journal in found for name, _ in journal.state.labels}
        if (spec := specs.get(collection)) is not None:
            labels |= {field.name for field in spec.partitions}
        selector.check_known(labels)
        return
    known |= {journal.state.collection for journal in await journals.list()}
    raise unknown_collection(collection, known)
