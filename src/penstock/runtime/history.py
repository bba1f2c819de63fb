"""What a task goes on from: its recovery log, and what was asked of it meanwhile.

A task is built from its catalog and from this. It is loaded before the task is built, without
leading the log, and once more by the session that leads it: whatever happened in between counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.consensus.statelog import load as load_log
from penstock.consensus.store import Consensus
from penstock.runtime import requests
from penstock.runtime.recovery import (
    Entries,
    Generation,
    RecoveryMachine,
    generations,
    last_applied,
    recovery_key,
)
from penstock.runtime.requests import Refills


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The past of a task, as far as it decides how it goes on."""

    generations: Mapping[str, Generation] = field(default_factory=dict)
    """By the name of a resource."""
    refills: Refills = Refills()  # noqa: RUF009 - frozen
    last_applied: bytes | None = None
    """The task as it was applied to its endpoint last."""

    @classmethod
    def of(cls, entries: Entries, refills: Refills) -> History:
        """Return the history of a recovery log."""
        return cls(
            generations=generations(entries), refills=refills, last_applied=last_applied(entries)
        )


async def load_history(store: Consensus, task: str, renamed_from: str | None = None) -> History:
    """Load the history of a materialization, under its former name if that is all there is."""
    entries = (await load_log(store, recovery_key(task), RecoveryMachine())).state
    if not has_history(entries) and renamed_from is not None:
        entries = (await load_log(store, recovery_key(renamed_from), RecoveryMachine())).state
    return History.of(entries, await requests.refills(store, task, renamed_from))


def has_history(entries: Entries) -> bool:
    return bool(generations(entries)) or last_applied(entries) is not None
