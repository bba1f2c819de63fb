"""`penstock check`: is a catalog right, and if not, everything that is wrong with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.frame import print_json, stdout
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.errors import UsageError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.catalog.build import Outcome
    from penstock.catalog.desired import ChangeRefused


def check(
    settings: Settings,
    catalogs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Catalog files, or directories with a catalog.yaml.", show_default=False
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show how each collection is stored and reduced.")
    ] = False,
    print_schema: Annotated[
        bool, typer.Option("--print-schema", help="Print the JSON Schema of catalogs, for editors.")
    ] = False,
    without_secrets: Annotated[
        bool, typer.Option("--without-secrets", help="Do not ask whether secrets are set.")
    ] = False,
    allow_outside: Annotated[
        bool,
        typer.Option("--allow-outside", help="Allow files outside of the catalog's directory."),
    ] = False,
) -> None:
    """Load a catalog with its imports and report every mistake in it. Starts no Spark.

    Where documents were written before, a change that would make them unreadable is one, too.

    Example: penstock check catalog.yaml
    """
    if print_schema:
        print_json(editor_schema())
        return
    from penstock.catalog.build import build_catalog
    from penstock.connectors.builtin import locate

    mains = [*(catalogs or ()), *settings.catalog]
    if not mains:
        raise UsageError("which catalog?", fix="penstock check catalog.yaml")
    environ = None if without_secrets else os.environ
    outcome = build_catalog(mains, environ=environ, allow_outside=allow_outside, locate=locate)
    refused = stops.run(_refused(settings, outcome)) if outcome.ok else None
    if settings.json:
        print_json({**report(outcome, explain=explain), "refused": refused and refused.what})
    else:
        _print(outcome, explain=explain)
    if refused is not None:
        raise refused
    if not outcome.ok:
        raise typer.Exit(1)


async def _refused(settings: Settings, outcome: Outcome) -> ChangeRefused | None:
    """Why the catalog cannot follow the one that is in force here, if there is one."""
    from penstock.catalog.desired import ChangeRefused, apply
    from penstock.catalog.evolution import fits_documents
    from penstock.deployment import is_there

    if not is_there(settings):
        return None
    async with opened(settings) as store:
        try:
            await apply(store, outcome.catalog, check=fits_documents(store), dry_run=True)
        except ChangeRefused as refused:
            return refused
    return None


def editor_schema() -> dict[str, object]:
    """The grammar as JSON Schema: completion and errors while typing."""
    from penstock.catalog.grammar import CATALOG
    from penstock.catalog.kinds import json_schema

    return {
        "$schema": "https://json-schema.org/draft/2019-09/schema",
        "title": "Penstock catalog",
        **json_schema(CATALOG),
    }


def report(outcome: Outcome, *, explain: bool) -> dict[str, object]:
    """The result for machines."""
    result: dict[str, object] = {
        "ok": outcome.ok,
        "diagnostics": [d.to_json() for d in outcome.diagnostics],
        "summary": summary(outcome),
    }
    if explain:
        from penstock.catalog.explain import explain_collection

        result["collections"] = {
            c.name: explain_collection(c).to_json() for c in outcome.catalog.collections
        }
    return result


def summary(outcome: Outcome) -> dict[str, int]:
    """How many there are of each kind."""
    catalog = outcome.catalog
    return {
        "files": len(outcome.files),
        "collections": len(catalog.collections),
        "derivations": len(catalog.derivations),
        "captures": len(catalog.captures),
        "materializations": len(catalog.materializations),
        "tests": len(catalog.tests),
        "errors": sum(d.is_error for d in outcome.diagnostics),
        "warnings": sum(not d.is_error for d in outcome.diagnostics),
    }


def _print(outcome: Outcome, *, explain: bool) -> None:
    for diagnostic in outcome.diagnostics:
        stdout.print(diagnostic.render(), markup=False)
    if explain:
        from penstock.catalog.explain import explain_collection

        for collection in outcome.catalog.collections:
            stdout.print(explain_collection(collection).render(), markup=False)
    counts = summary(outcome)
    if outcome.ok:
        kinds = ("collections", "derivations", "captures", "materializations", "tests")
        listed = ", ".join(_count(counts[kind], kind) for kind in kinds if counts[kind])
        warned = f"; {_count(counts['warnings'], 'warnings')}" if counts["warnings"] else ""
        stdout.print(f"[green]ok[/]: {listed or 'nothing is defined'}{warned}")
    else:
        stdout.print(f"[red]{_count(counts['errors'], 'errors')}[/]")


def _count(number: int, plural: str) -> str:
    return f"{number} {plural.removesuffix('s') if number == 1 else plural}"
