"""Check that a changed catalog fits the documents already stored.

A changed collection keeps its journals, so every document in them must be readable under the new
schema (`journal.compatible`). A collection without documents may change in any way.
"""

from __future__ import annotations

from penstock.catalog.desired import Change, Check
from penstock.consensus.store import Consensus
from penstock.journal.compatible import incompatible
from penstock.journal.journals import Journals
from penstock.model.spec import CollectionSpec
from penstock.model.violations import Problem


def fits_documents(store: Consensus) -> Check:
    """Return a check for `desired.apply` that refuses changes which make documents unreadable."""
    journals = Journals(store)

    async def check(change: Change) -> str | None:
        before, after = change.before, change.after
        if not isinstance(before, CollectionSpec) or not isinstance(after, CollectionSpec):
            return None
        problems = [p for p in incompatible(before, after) if not p.code.startswith("W-")]
        if not problems and not after.reset:
            return None
        for journal in await journals.list(before.name):
            if journal.state.end > journal.state.begin:
                return _objection(journal.name, problems, reset=after.reset)
        return None

    return check


def _objection(journal: str, problems: list[Problem], *, reset: bool) -> str:
    rows = [f"journal {journal} has documents"]
    if reset:
        rows.append("reset: true would discard them, which this release does not support")
    for problem in problems:
        rows.append(f"{problem.pointer or '/'}: {problem.message} [{problem.code}]")
        if problem.hint:
            rows.append(f"  hint: {problem.hint}")
    return "\n    ".join(rows)
