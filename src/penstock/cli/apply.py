"""`penstock apply`: make a catalog the desired state of a data directory."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.frame import print_json, stderr
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.cli.tables import TableColumn, print_table
from penstock.errors import UsageError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.catalog.build import BuildResult
    from penstock.catalog.desired import ApplyResult
    from penstock.consensus.store import Consensus
    from penstock.model.observed import Observed

_COLUMNS = (
    TableColumn("CHANGE"),
    TableColumn("KIND"),
    TableColumn("NAME"),
    TableColumn("BEFORE"),
    TableColumn("AFTER"),
)


def apply(
    settings: Settings,
    catalogs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Catalog files, or directories with a catalog.yaml.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the changes without making them.")
    ] = False,
    without_secrets: Annotated[
        bool, typer.Option("--without-secrets", help="Do not check that secrets are set.")
    ] = False,
    allow_outside: Annotated[
        bool,
        typer.Option("--allow-outside", help="Allow files outside the catalog's directory."),
    ] = False,
) -> None:
    """Check a catalog and make it the desired state; definitions missing from it are removed.

    Example: penstock apply catalog.yaml --dry-run
    """
    mains = [*(catalogs or ()), *settings.catalog]
    if not mains:
        raise UsageError("no catalog given", fix="penstock apply catalog.yaml")
    environ = None if without_secrets else os.environ
    build = partial(_built, mains, environ, allow_outside=allow_outside)
    build({})  # what is wrong with it is said before a store is asked or made
    applied = stops.run(_apply(settings, build, dry_run=dry_run))
    if settings.json:
        print_json(report(applied, dry_run=dry_run))
        return
    rows = [[text or "-" for text in change.values()] for change in changes(applied)]
    print_table(_COLUMNS, rows)
    for each in applied.tables:
        column = "" if each.column is None else f".{each.column}"
        stderr.print(f"{each.how}: {each.table}{column}: {each.says}", markup=False)
    stderr.print(summary(applied, dry_run=dry_run), markup=False)


def _built(
    mains: Sequence[Path],
    environ: Mapping[str, str] | None,
    inferred: Mapping[str, Observed],
    *,
    allow_outside: bool = False,
) -> BuildResult:
    from penstock.catalog.build import build_valid
    from penstock.connectors.builtin import BUILTIN

    return build_valid(
        mains,
        environ=environ,
        allow_outside=allow_outside,
        connectors=BUILTIN,
        inferred=inferred,
    )


async def _apply(
    settings: Settings,
    build: Callable[[Mapping[str, Observed]], BuildResult],
    *,
    dry_run: bool,
) -> ApplyResult:
    async with opened(settings, create=True) as store:
        return await _applied(store, build, dry_run=dry_run)


async def _applied(
    store: Consensus, build: Callable[[Mapping[str, Observed]], BuildResult], *, dry_run: bool
) -> ApplyResult:
    from penstock import applying
    from penstock.journal.inferred import all_inferred

    built = build(await all_inferred(store))
    return await applying.apply(store, built, dry_run=dry_run)


async def applied_first(store: Consensus, mains: Sequence[Path]) -> ApplyResult:
    """Check and apply catalogs before they are run, as `penstock apply` does."""
    return await _applied(store, partial(_built, mains, os.environ), dry_run=False)


def report(applied: ApplyResult, *, dry_run: bool) -> dict[str, object]:
    """Return the result for --json."""
    return {
        "version": applied.version,
        "dry_run": dry_run,
        "changes": changes(applied),
        "tables": tables(applied),
    }


def changes(applied: ApplyResult) -> list[dict[str, str | None]]:
    """Return the changes, with the fingerprints before and after."""
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


def tables(applied: ApplyResult) -> list[dict[str, object]]:
    """Return what the next runs will do to tables that exist."""
    return [dataclasses.asdict(each) for each in applied.tables]


def summary(applied: ApplyResult, *, dry_run: bool) -> str:
    """Summarize the changes in one line."""
    if not applied.changes:
        return f"no changes: this catalog is version {applied.version}"
    counts = Counter(change.action for change in applied.changes)
    listed = ", ".join(f"{count} {action}" for action, count in sorted(counts.items()))
    verb = "would become" if dry_run else "is now"
    return f"{listed}: the catalog {verb} version {applied.version}"
