"""`penstock verify`: whether everything is as it was written."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import typer

from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.gc import progress_bar
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.cli.tables import counted
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.journal.verify import Fault, Verified


def verify(settings: Settings) -> None:
    """Read everything and compare it with its checksums, while readers and writers continue.

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
        f"state logs: {found.logs:,}, with {found.entries:,} entries; schemas: {found.schemas:,}",
        f"{counted(found.journals, 'journal')}: {counted(found.records, 'record')}, "
        f"{counted(found.pages, 'page')}, {counted(found.objects, 'object')} and "
        f"{counted(found.inline, 'inline fragment')} with {counted(found.rows, 'document')}, "
        f"{counted(found.bytes, 'byte')}",
    ]
    if found.unsummed:
        lines.append(
            f"written by a release without checksums, and only decoded: "
            f"{counted(found.unsummed, 'object')}"
        )
    if found.unnamed:
        lines.append(f"not in any journal, and not checked: {counted(found.unnamed, 'object')}")
    if not found.faults:
        return [*lines, "no faults: all checksums match"]
    return [*lines, counted(len(found.faults), "fault")]


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
