"""`penstock compact`: small fragments into large objects, old records into pages."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.frame import print_json, stdout
from penstock.cli.gc import progress_bar
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.cli.tables import counted
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.journal.upkeep import Compacted, CompactionOptions


def compact(
    settings: Settings,
    collection: Annotated[
        str | None, typer.Argument(help="One collection; all by default.", show_default=False)
    ] = None,
    target: Annotated[
        str, typer.Option("--target", help="Maximum size of the merged objects.")
    ] = "128MiB",
    inputs: Annotated[
        int,
        typer.Option("--inputs", min=2, help="Merge at least N fragments at a time."),
    ] = 2,
) -> None:
    """Merge small neighbouring fragments, while readers and writers continue.

    penstock gc removes the replaced objects later.

    Example: penstock compact acme/orders
    """
    from penstock.cli.persistd import size
    from penstock.journal.upkeep import CompactionOptions

    options = CompactionOptions(target_bytes=size(target, "--target"), inputs_min=inputs)
    done = stops.run(_compact(settings, collection, options))
    if settings.json:
        print_json(dataclasses.asdict(done))
    elif not done.objects and not done.pages:
        stdout.print("nothing to compact")
    else:
        pages = f", {counted(done.pages, 'page')} of records" if done.pages else ""
        stdout.print(
            f"rewrote {counted(done.fragments, 'fragment')} of "
            f"{counted(done.journals, 'journal')} as {counted(done.objects, 'object')}: "
            f"{counted(done.rows, 'document')}, "
            f"{done.bytes_before:,} bytes before, {done.bytes_after:,} after{pages}",
            markup=False,
        )


async def _compact(
    settings: Settings, collection: str | None, options: CompactionOptions
) -> Compacted:
    from penstock.catalog.desired import codecs
    from penstock.journal.blobs import open_blobs
    from penstock.journal.journals import Journals
    from penstock.journal.ownership import Ownership
    from penstock.journal.schemas import Schemas
    from penstock.journal.upkeep import compact_all

    async with opened(settings) as store:
        journals, blobs = Journals(store), open_blobs(settings.blob)
        await Ownership(journals, blobs).check()
        with progress_bar("journals") as progress:
            return await compact_all(
                journals,
                blobs,
                Schemas(store),
                collection,
                options=options,
                progress=progress,
                codecs=await codecs(store),
            )
