"""`penstock verify`: whether everything is as it was written."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer

from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.gc import progress_bar
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.journal.verify import Fault, Verified


def verify(settings: Settings) -> None:
    """Read everything once, and compare it with its checksums; readers and writers go on.

    State logs, journals, the objects they name, schemas, the catalog and the state of tasks. Lists
    what is damaged or missing, and exits with 1 if anything is. Nothing is changed.

    Example: penstock verify --json
    """
    found = stops.run(_verify(settings))
    if settings.json:
        print_json(dataclasses.asdict(found))
    else:
        for fault in found.faults:
            stdout.print(_text(fault), markup=False)
        for line in _summary(found):
            stderr.print(line, markup=False)
    if found.faults:
        raise typer.Exit(1)


def _text(fault: Fault) -> str:
    about = (("where", fault.where), ("why", fault.why), ("fix", fault.fix))
    return "\n".join([fault.what, *(f"  {label:<5} {text}" for label, text in about if text)])


def _summary(found: Verified) -> list[str]:
    lines = [
        f"{found.logs:,} state logs with {found.entries:,} entries, {found.schemas:,} schemas",
        f"{found.journals:,} journals: {found.records:,} records, {found.pages:,} pages, "
        f"{found.objects:,} objects and {found.inline:,} inline fragments with {found.rows:,} "
        f"documents, {found.bytes:,} bytes",
    ]
    if found.unsummed:
        lines.append(
            f"{found.unsummed:,} objects are of a release that took no checksums: "
            "they were only decoded"
        )
    if found.unnamed:
        lines.append(f"{found.unnamed:,} objects are named by no journal, and were not looked at")
    if not found.faults:
        return [*lines, "everything is as it was written"]
    count = len(found.faults)
    return [*lines, "1 fault" if count == 1 else f"{count:,} faults"]


async def _verify(settings: Settings) -> Verified:
    from penstock.catalog import desired
    from penstock.consensus.statelog import load
    from penstock.journal.blobs import open_blobs
    from penstock.journal.verify import verify as verify_all
    from penstock.runtime.recovery import TASKS, RecoveryMachine

    async with opened(settings) as store:

        async def catalog(key: str) -> None:
            replica = await load(store, key, desired.DesiredMachine())
            replica.state.catalog()

        async def recovery(key: str) -> None:
            await load(store, key, RecoveryMachine())

        with progress_bar("journals") as progress:
            return await verify_all(
                store,
                open_blobs(settings.blob),
                checks={desired.CATALOG_KEY: catalog, TASKS: recovery},
                progress=progress,
            )
