"""Check that a changed catalog fits what is already there: documents, and state of derivations.

A changed collection keeps its journals, so every document in them must be readable under the new
schema (`journal.compatible`). A collection without documents may change in any way.

A task whose paths were recorded as they were written is not moved to other files unnoticed.

Migrations made the tables that a derivation's state is in, and never run again. So those of the
recorded catalog stay as they are, and new ones follow them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os.path import normpath
from pathlib import Path
from typing import Final

from penstock.catalog.desired import Change, Check
from penstock.catalog.diagnostics import Diagnostic
from penstock.catalog.nodes import Node
from penstock.consensus.store import Consensus
from penstock.journal.compatible import incompatible
from penstock.journal.journals import Journals
from penstock.model import pointer
from penstock.model.json_order import Json
from penstock.model.spec import CaptureSpec, CollectionSpec, MaterializationSpec
from penstock.model.violations import Problem

_Task: Final = (CaptureSpec, MaterializationSpec)


def fits_stored(store: Consensus, collections: Mapping[str, Node] | None = None) -> Check:
    """Return a check for `desired.apply` that refuses changes which do not fit what is stored.

    `collections` are where the changed catalog is written, for positions.
    """
    journals = Journals(store)

    async def check(change: Change) -> str | None:
        before, after = change.before, change.after
        if isinstance(before, _Task) and isinstance(after, _Task):
            moved = list(moved_paths(before.endpoint.config.value, after.endpoint.config.value))
            return "\n    ".join(moved) or None
        if not isinstance(before, CollectionSpec) or not isinstance(after, CollectionSpec):
            return None
        if changed := list(changed_migrations(before, after)):
            node = (collections or {}).get(after.name)
            return "\n    ".join(_located(problem, node) for problem in changed)
        problems = [p for p in incompatible(before, after) if not p.code.startswith("W-")]
        if not problems:
            return None
        for journal in await journals.list(before.name):
            if journal.state.end > journal.state.begin:
                return _objection(journal.name, problems)
        return None

    return check


def moved_paths(before: Json, after: Json, at: str = "") -> Iterator[str]:
    """Yield paths that lead elsewhere since they are relative to the catalog.

    Releases before that recorded paths as they were written, and a task read them relative to where
    it ran. If that is here, the new path would leave what is there behind.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before.keys() & after.keys():
            yield from moved_paths(before[name], after[name], pointer.child(at, name))
    if not isinstance(before, str) or not isinstance(after, str) or before == after:
        return
    here = normpath(Path.cwd() / before)
    made_absolute = not before.startswith("/") and after.endswith(f"/{normpath(before)}")
    if made_absolute and here != after and Path(here).exists():
        yield f"{at}: {before} was {here} until now, and would be {after}"
        yield f"  hint: paths are relative to the catalog; to keep what is there, write {here}"


def changed_migrations(before: CollectionSpec, after: CollectionSpec) -> Iterator[Problem]:
    """Yield every migration of a derivation that was recorded, and is not as it was."""
    if before.derivation is None or after.derivation is None:
        return
    published, now = before.derivation.migrations, after.derivation.migrations
    for i, text in enumerate(published):
        if i < len(now) and now[i].strip() == text.strip():
            continue
        did = "changed" if i < len(now) else "was removed"
        yield Problem(
            code="E-MIGRATION",
            pointer=f"/derive/using/sqlite/migrations/{i}",
            message=f"migration {i + 1} {did} since it was applied",
            hint="leave it as it was, and append a new one to the list"
            if i < len(now)
            else "put it back: the state of the derivation is in its tables",
        )


def _located(problem: Problem, collection: Node | None) -> str:
    if collection is None:
        text = f"{problem.pointer}: {problem.message} [{problem.code}]\n  hint: {problem.hint}"
    else:
        node = collection.closest(problem.pointer)
        text = Diagnostic(
            at=node.at,
            pointer=node.pointer,
            code=problem.code,
            message=problem.message,
            hint=problem.hint,
        ).render()
    return text.replace("\n", "\n    ")


def _objection(journal: str, problems: list[Problem]) -> str:
    rows = [f"journal {journal} has documents"]
    for problem in problems:
        rows.append(f"{problem.pointer or '/'}: {problem.message} [{problem.code}]")
        if problem.hint:
            rows.append(f"  hint: {problem.hint}")
    return "\n    ".join(rows)
