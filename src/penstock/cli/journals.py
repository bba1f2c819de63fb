"""`penstock journals`: which journals there are, and what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.frame import print_json, stderr
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.cli.tables import TableColumn, print_table, size_text
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.journal.journals import Journal
    from penstock.journal.selector import LabelSelector

_COLUMNS = (
    TableColumn("NAME"),
    TableColumn("STATUS"),
    TableColumn("OFFSETS", number=True),
    TableColumn("ROWS", number=True),
    TableColumn("FRAGMENTS", number=True),
    TableColumn("BYTES", number=True),
    TableColumn("PRODUCERS", number=True),
    TableColumn("LABELS"),
)


def journals(
    settings: Settings,
    collection: Annotated[
        str | None,
        typer.Argument(help="A collection name or prefix.", show_default=False),
    ] = None,
    selector: Annotated[
        str,
        typer.Option(
            "--selector", help="Select by label: region=eu,env!=test or region in (eu,us)."
        ),
    ] = "",
) -> None:
    """List journals with their offsets, rows, fragments, bytes and producers.

    Fragments and producers count what is not yet sealed into pages; rows and bytes count all.

    Example: penstock journals acme/orders --selector 'region in (eu, us)'
    """
    from penstock.journal.selector import LabelSelector

    found = stops.run(_list(settings, collection, LabelSelector.parse(selector)))
    if settings.json:
        print_json([describe(journal) for journal in found])
        return
    print_table(_COLUMNS, [_row(journal) for journal in found])
    if not found:
        stderr.print(f"no journals{f' of {collection}' if collection else ''}", markup=False)


async def _list(
    settings: Settings, collection: str | None, selector: LabelSelector
) -> tuple[Journal, ...]:
    from penstock.journal.journals import Journals

    async with opened(settings) as store:
        every = await Journals(store).list(collection)
        if every:
            selector.check_known({name for each in every for name, _ in each.state.labels})
        return tuple(each for each in every if selector.matches(each.state.labels))


def describe(journal: Journal) -> dict[str, Any]:
    """A journal for machines."""
    from penstock.journal.state import Fragment

    state = journal.state
    fragments = [record for record in state.records if isinstance(record, Fragment)]
    producers = {run.producer for fragment in fragments for run in fragment.runs}
    producers |= {r.producer for r in state.records if not isinstance(r, Fragment)}
    return {
        "name": journal.name,
        "collection": state.collection,
        "status": state.status.value,
        "begin": state.begin,
        "end": state.end,
        "rows": sum(f.rows for f in fragments) + sum(page.rows for page in state.pages),
        "bytes": sum(f.bytes for f in fragments) + sum(page.bytes for page in state.pages),
        "fragments": len(fragments),
        "pages": len(state.pages),
        "producers": sorted(map(str, producers)),
        "generation": state.generation,
        "key_begin": state.key_begin,
        "key_end": state.key_end,
        "labels": dict(state.labels),
    }


def _row(journal: Journal) -> tuple[str, ...]:
    of = describe(journal)
    state = journal.state
    return (
        journal.name,
        state.status.value,
        f"{state.begin}..{state.end}",
        str(of["rows"]),
        str(of["fragments"]),
        size_text(of["bytes"]),
        str(len(of["producers"])),
        ",".join(f"{name}={value}" for name, value in state.labels),
    )
