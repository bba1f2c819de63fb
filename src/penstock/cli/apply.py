"""`penstock apply`: make a catalog the desired state of a data directory."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.frame import print_json, stderr
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.cli.tables import Column, print_table
from penstock.errors import UsageError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.catalog.desired import Applied
    from penstock.connectors.builtin import Idle
    from penstock.model.spec import Catalog

_COLUMNS = (Column("CHANGE"), Column("KIND"), Column("NAME"), Column("BEFORE"), Column("AFTER"))


def apply(
    settings: Settings,
    catalogs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Catalog files, or directories with a catalog.yaml.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would change, and change nothing.")
    ] = False,
    without_secrets: Annotated[
        bool, typer.Option("--without-secrets", help="Do not ask whether secrets are set.")
    ] = False,
    allow_outside: Annotated[
        bool,
        typer.Option("--allow-outside", help="Allow files outside of the catalog's directory."),
    ] = False,
) -> None:
    """Check a catalog and record it as what shall run here; what it leaves out is removed.

    Example: penstock apply catalog.yaml --dry-run
    """
    from penstock.catalog.build import load_catalog
    from penstock.connectors.builtin import idle_tasks, locate

    mains = [*(catalogs or ()), *settings.catalog]
    if not mains:
        raise UsageError("which catalog?", fix="penstock apply catalog.yaml")
    environ = None if without_secrets else os.environ
    catalog = load_catalog(mains, environ=environ, allow_outside=allow_outside, locate=locate)
    applied = stops.run(_apply(settings, catalog, dry_run=dry_run))
    idle = idle_tasks(catalog)
    if settings.json:
        print_json(report(applied, idle, dry_run=dry_run))
        return
    rows = [[text or "-" for text in change.values()] for change in changes(applied)]
    print_table(_COLUMNS, rows)
    stderr.print(summary(applied, dry_run=dry_run), markup=False)
    for each in idle:
        stderr.print(f"{each.name} is only recorded: {each.why}", markup=False)


async def _apply(settings: Settings, catalog: Catalog, *, dry_run: bool) -> Applied:
    from penstock.catalog import desired
    from penstock.catalog.evolution import fits_documents

    async with opened(settings, create=True) as store:
        return await desired.apply(store, catalog, check=fits_documents(store), dry_run=dry_run)


def report(applied: Applied, idle: Sequence[Idle], *, dry_run: bool) -> dict[str, object]:
    """The result for machines."""
    return {
        "version": applied.version,
        "dry_run": dry_run,
        "changes": changes(applied),
        "cannot_run": [dataclasses.asdict(each) for each in idle],
    }


def changes(applied: Applied) -> list[dict[str, str | None]]:
    """What changes, with the fingerprints of what was and of what will be."""
    from penstock.model.spec import fingerprint

    return [
        {
            "change": change.action,
            "kind": change.kind.value,
            "name": change.name,
            "before": fingerprint(change.before) if change.before else None,
            "after": fingerprint(change.after) if change.after else None,
        }
        for change in applied.changes
    ]


def summary(applied: Applied, *, dry_run: bool) -> str:
    """One line of it."""
    if not applied.changes:
        return f"nothing changes: version {applied.version} is this catalog"
    counts = Counter(change.action for change in applied.changes)
    listed = ", ".join(f"{count} {action}" for action, count in sorted(counts.items()))
    verb = "would make" if dry_run else "made"
    return f"{listed}: {verb} version {applied.version}"
