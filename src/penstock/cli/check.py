"""`penstock check`: report everything that is wrong with a catalog."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.catalogs import main_files
from penstock.cli.frame import print_json, stdout
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.catalog.build import BuildResult
    from penstock.catalog.desired import ChangeRefused


def check(
    settings: Settings,
    catalogs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Catalog files, or directories with a catalog.yaml; ./catalog.yaml by default.",
            show_default=False,
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show how each collection is stored and reduced.")
    ] = False,
    without_secrets: Annotated[
        bool, typer.Option("--without-secrets", help="Do not check that secrets are set.")
    ] = False,
    allow_outside: Annotated[
        bool,
        typer.Option("--allow-outside", help="Allow files outside the catalog's directory."),
    ] = False,
) -> None:
    """Check a catalog and its imports, and report every error. Does not start Spark.

    A change that does not fit the stored documents, or the state of derivations, is an error too.
    So is one that a table cannot follow whose binding says `abort`.

    Example: penstock check catalog.yaml
    """
    from penstock.catalog.build import build_catalog
    from penstock.connectors.builtin import BUILTIN

    mains = main_files(settings, catalogs, "check")
    environ = None if without_secrets else os.environ
    result = build_catalog(mains, environ=environ, allow_outside=allow_outside, connectors=BUILTIN)
    refused = stops.run(_refused(settings, result)) if result.ok else None
    if settings.json:
        print_json({**report(result, explain=explain), "refused": refused and refused.what})
    else:
        _print(result, explain=explain)
    if refused is not None:
        raise refused
    if not result.ok:
        raise typer.Exit(1)


async def _refused(settings: Settings, result: BuildResult) -> ChangeRefused | None:
    """Return why the catalog cannot replace the current one; None if it can."""
    from penstock.applying import apply
    from penstock.catalog.desired import ChangeRefused
    from penstock.deployment import is_there

    if not is_there(settings):
        return None
    async with opened(settings) as store:
        try:
            await apply(store, result, dry_run=True)
        except ChangeRefused as refused:
            return refused
    return None


def report(result: BuildResult, *, explain: bool) -> dict[str, object]:
    """Return the result for --json."""
    found: dict[str, object] = {
        "ok": result.ok,
        "diagnostics": [d.to_json() for d in result.diagnostics],
        "summary": summary(result),
    }
    if explain:
        from penstock.catalog.explain import explain_collection

        found["collections"] = {
            c.name: explain_collection(c, result.catalog).to_json()
            for c in result.catalog.collections
        }
    return found


def summary(result: BuildResult) -> dict[str, int]:
    """Count the definitions of each kind."""
    catalog = result.catalog
    return {
        "files": len(result.files),
        "collections": len(catalog.collections),
        "derivations": len(catalog.derivations),
        "captures": len(catalog.captures),
        "materializations": len(catalog.materializations),
        "tests": len(catalog.tests),
        "errors": sum(d.is_error for d in result.diagnostics),
        "warnings": sum(not d.is_error for d in result.diagnostics),
    }


def _print(result: BuildResult, *, explain: bool) -> None:
    for diagnostic in result.diagnostics:
        stdout.print(diagnostic.render(), markup=False)
    if explain:
        from penstock.catalog.explain import explain_collection

        for collection in result.catalog.collections:
            stdout.print(explain_collection(collection, result.catalog).render(), markup=False)
    counts = summary(result)
    if result.ok:
        kinds = ("collections", "derivations", "captures", "materializations", "tests")
        listed = ", ".join(_count(counts[kind], kind) for kind in kinds if counts[kind])
        warned = f"; {_count(counts['warnings'], 'warnings')}" if counts["warnings"] else ""
        stdout.print(f"[green]ok[/]: {listed or 'the catalog is empty'}{warned}")
    else:
        stdout.print(f"[red]{_count(counts['errors'], 'errors')}[/]")


def _count(number: int, plural: str) -> str:
    return f"{number} {plural.removesuffix('s') if number == 1 else plural}"
