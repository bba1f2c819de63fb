"""`penstock apply`: make a catalog the desired state of a data directory."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli.catalogs import main_files
from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.errors import UserError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.catalog.build import BuildResult
    from penstock.catalog.desired import ApplyResult, Change, Name
    from penstock.catalog.plan import Difference, PlannedChange
    from penstock.consensus.store import Consensus
    from penstock.model.json_order import Absent, Json
    from penstock.model.observed import Observed

Yes = Annotated[
    bool,
    typer.Option(
        "--yes", help="Also remove the tasks and collections that the given catalogs leave out."
    ),
]

_WIDTH: Final = 80
"""Of the lines about keys, wherever they are printed."""


def apply(
    settings: Settings,
    catalogs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Catalog files, or directories with a catalog.yaml; ./catalog.yaml by default.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the changes without making them.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove tasks and collections without asking.")
    ] = False,
    without_secrets: Annotated[
        bool, typer.Option("--without-secrets", help="Do not check that secrets are set.")
    ] = False,
    allow_outside: Annotated[
        bool,
        typer.Option("--allow-outside", help="Allow files outside the catalog's directory."),
    ] = False,
) -> None:
    """Check a catalog and make it the desired state, after showing what changes.

    The given files together are the whole catalog: tasks and collections that they leave out are
    removed, after you confirm it. Without a terminal, give --yes, or nothing is applied and the
    exit code is 1. Removing a definition deletes no documents, tables or progress: a task that is
    defined again continues where it was.

    Example: penstock apply catalog.yaml --dry-run
    """
    mains = main_files(settings, catalogs, "apply")
    environ = None if without_secrets else os.environ
    build = partial(_built, mains, environ, allow_outside=allow_outside)
    build({})  # mistakes are reported before a store is opened or created
    applied = stops.run(_apply(settings, mains, build, dry_run=True))
    if not settings.json:
        for line in lines(applied):
            stdout.print(line, markup=False)
        for line in table_lines(applied):
            stdout.print(line, markup=False)
    if not dry_run:
        if applied.removed and not yes:
            _confirm(applied, mains)
        stops.outcome = "it was applied completely, or not at all: run it again"
        may_remove = None if yes else applied.removed
        applied = stops.run(_apply(settings, mains, build, may_remove=may_remove))
    if settings.json:
        print_json(report(applied, dry_run=dry_run))
    else:
        stderr.print(summary(applied, dry_run=dry_run), markup=False)


def _confirm(applied: ApplyResult, mains: Sequence[Path]) -> None:
    """Ask whether to remove tasks and collections; raise on no, and if there is nobody to ask."""
    from penstock.catalog.desired import check_removals

    if not sys.stdin.isatty():
        check_removals(applied, _paths(mains), ())
    removed = [c for c in applied.changes if (c.kind, c.name) in applied.removed]
    names = ", ".join(map(_removal, removed))
    stdout.file.flush()
    try:
        agreed = typer.confirm(f"Remove {names}?", err=True)
    except typer.Abort:  # Ctrl-C, or the end of input
        stderr.print()
        agreed = False
    if not agreed:
        raise UserError("nothing was applied", why="the removal was not confirmed")


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
    mains: Sequence[Path],
    build: Callable[[Mapping[str, Observed]], BuildResult],
    *,
    dry_run: bool = False,
    may_remove: Collection[Name] | None = (),
) -> ApplyResult:
    async with opened(settings, create=True) as store:
        return await _applied(store, mains, build, dry_run=dry_run, may_remove=may_remove)


async def _applied(
    store: Consensus,
    mains: Sequence[Path],
    build: Callable[[Mapping[str, Observed]], BuildResult],
    *,
    dry_run: bool = False,
    may_remove: Collection[Name] | None,
) -> ApplyResult:
    from penstock import applying
    from penstock.journal.inferred import all_inferred

    built = build(await all_inferred(store))
    return await applying.apply(
        store, built, dry_run=dry_run, files=_paths(mains), may_remove=may_remove
    )


def _paths(mains: Sequence[Path]) -> list[str]:
    return [str(main.resolve()) for main in mains]


async def applied_first(store: Consensus, mains: Sequence[Path], *, yes: bool) -> ApplyResult:
    """Check and apply catalogs before they are run, as `penstock apply` does.

    It asks nothing: `yes` allows it to remove what the catalogs leave out.
    """
    build = partial(_built, mains, os.environ)
    return await _applied(store, mains, build, may_remove=None if yes else ())


# ----------------------------------------------------------------------------------------- printing

_VERBS: Final = {"added": "create", "changed": "change", "removed": "remove"}


def report(applied: ApplyResult, *, dry_run: bool) -> dict[str, object]:
    """Return the result for --json."""
    return {
        "version": applied.version,
        "dry_run": dry_run,
        "changes": changes(applied),
        "tables": tables(applied),
        "removed": [{"kind": kind.value, "name": name} for kind, name in applied.removed],
    }


def changes(applied: ApplyResult) -> list[dict[str, object]]:
    """Return the changes: the keys that differ, and the fingerprints before and after."""
    from penstock.catalog.plan import planned
    from penstock.model.spec import fingerprint

    return [
        {
            "change": change.action,
            "kind": change.kind.value,
            "name": change.name,
            "keys": [difference.to_json() for difference in plan.keys],
            "rebuilds": [rebuild.to_json() for rebuild in plan.rebuilds],
            "before": fingerprint(change.before) if change.before else None,
            "after": fingerprint(change.after) if change.after else None,
        }
        for change in applied.changes
        for plan in (planned(change),)
    ]


def lines(applied: ApplyResult) -> Iterator[str]:
    """Yield the plan in words: a line per definition, and below it the keys that change."""
    from penstock.catalog.plan import planned

    former = {(kind, name): old for (kind, old), name in applied.renamed.items()}
    gone = {(c.kind, c.name): c.before for c in applied.changes if c.after is None}
    for change in applied.changes:
        name = (change.kind, change.name)
        if name in gone and name in applied.renamed:
            continue
        if change.before is None and (before := gone.get((change.kind, former.get(name, "")))):
            yield f"rename  {change.kind.value} {former[name]} to {change.name}"
            change = dataclasses.replace(change, before=before)
        else:
            yield f"{_VERBS[change.action]}  {change.kind.value} {change.name}"
        yield from _details(planned(change))


def _removal(change: Change) -> str:
    from penstock.catalog.desired import removed_word

    return f"{removed_word(change)} {change.name}"


def _details(plan: PlannedChange) -> Iterator[str]:
    for key in plan.keys:
        yield f"          {_key_line(key)}"
    for rebuild in plan.rebuilds:
        yield f"          rebuilds {rebuild.what}: {rebuild.why}"


def _key_line(difference: Difference) -> str:
    """Say how one key changes; a value that does not fit the line is cut, a key never is."""
    key, before, after = _first_line(difference)
    room = max(_WIDTH - 10 - len(key) - 2, 20)
    if before is None:
        return f"{key}: {_cut(after or '', room - 6)} (new)"
    if after is None:
        return f"{key}: {_cut(before, room - 10)} (removed)"
    if len(before) + len(after) + 3 <= room:
        return f"{key}: {before} → {after}"
    half = (room - 3) // 2
    return f"{key}: {_cut(before, half)} → {_cut(after, half)}"


def _first_line(difference: Difference) -> tuple[str, str | None, str | None]:
    """Return a key and its values as text; of code with several lines, the first that differs."""
    key = difference.pointer.removeprefix("/")
    before, after = map(_value_text, (difference.before, difference.after))
    if before is None or after is None or "\n" not in before + after:
        return key, before, after
    pairs = zip_longest(before.splitlines(), after.splitlines(), fillvalue="")
    for number, (old, new) in enumerate(pairs, 1):
        if old != new:
            return f"{key}, line {number}", old.strip(), new.strip()
    return key, before, after


def _value_text(value: Json | Absent) -> str | None:
    from penstock.model.json_order import Absent

    if isinstance(value, Absent):
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else f"{text[: width - 1]}…"


def table_lines(applied: ApplyResult) -> Iterator[str]:
    """Yield what the next runs will do to tables that exist."""
    for each in applied.tables:
        column = "" if each.column is None else f".{each.column}"
        yield f"table   {each.table}{column}: {each.how}: {each.says}"


def tables(applied: ApplyResult) -> list[dict[str, object]]:
    """Return what the next runs will do to tables that exist."""
    return [dataclasses.asdict(each) for each in applied.tables]


def summary(applied: ApplyResult, *, dry_run: bool) -> str:
    """Summarize the changes in one line."""
    if not applied.changes:
        return f"no changes; the catalog is at version {applied.version}"
    counts = Counter(change.action for change in applied.changes)
    listed = ", ".join(f"{count} {action}" for action, count in sorted(counts.items()))
    verb = "would become" if dry_run else "is now"
    return f"{listed}; the catalog {verb} version {applied.version}"
