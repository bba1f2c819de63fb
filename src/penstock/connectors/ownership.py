"""PURE: which task a table belongs to, and whether it still holds what that task stored.

An endpoint keeps a `TableRecord` of each target beside its checkpoints: the task that fills it, the
state key, and whether rows were stored. A task that finds a table compares the record with its
recovery log (`SinkTask.resumed`), and continues only if both tell the same story. Anything else
would mean wrong rows: documents counted twice in a table of another task, or lost from a table that
was dropped, emptied or replaced by hand.

Not noticed: rows that others change or delete as long as some are left; a table that was emptied
and has rows again; an SQLite table that was replaced by one with rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.connector.materialize import SinkTask, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRecord:
    """An endpoint's memory of a target."""

    state_key: str
    task: str | None = None
    """The task that fills it; None if an older release wrote the record."""
    filled: bool | None = None
    """True if rows were stored under the state key; None likewise."""
    identity: int | None = None
    """Tells which table it was, where tables of one name can be told apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The table at a target's path, if there is one."""

    there: bool
    is_empty: Callable[[], bool] = lambda: True
    identity: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Permission to use a table."""

    emptied: bool = False
    """True if its rows are out of date: of another state key, or of another task."""
    taken_from: str | None = None
    """The task that may not store to it any more."""


def claim(
    task: SinkTask,
    target: Target,
    record: TableRecord | None,
    found: Found,
    *,
    was: Target | None,
    hard_delete: bool,
    forget: str,
) -> Claim:
    """Decide whether a task may store to a table; raises a `ConnectorError` that says why not.

    `was` is the target as it was applied last. `forget` is the statement that removes the record,
    for people who know better.
    """
    resumed = target.binding in task.resumed
    name = ".".join(target.path)
    if record is None:
        if resumed and not found.there:
            raise _gone(task, name)
        return Claim()
    if record.task is None and not resumed and was is None:  # of an older release
        if found.there and not found.is_empty() and not target.takeover:
            raise _foreign(task, name, "another task")
        return Claim(emptied=target.takeover or record.state_key != target.state_key)
    if record.task is not None and record.task != task.name:
        if found.there and not target.takeover:
            raise _foreign(task, name, record.task)
        if resumed:
            raise _used_before(task, name, f"{record.task} has filled it since")
        return Claim(emptied=True, taken_from=record.task)
    if record.state_key != target.state_key:
        if resumed:
            raise _used_before(task, name, f"it was filled under {record.state_key} since")
        return Claim(emptied=True)
    filled = resumed if record.filled is None else record.filled
    if filled and not found.there:
        raise _gone(task, name)
    if (
        filled
        and None not in (record.identity, found.identity)
        and record.identity != found.identity
    ):
        raise _lost(
            task, name, "is not the table that was filled, but another in its place", forget
        )
    if record.filled and found.there and not resumed and not found.is_empty():
        raise _unknown(task, name)
    if record.filled and found.there and keeps_rows(target, hard_delete) and found.is_empty():
        raise _lost(task, name, "is empty, and had rows", forget)
    return Claim()


def keeps_rows(target: Target, hard_delete: bool) -> bool:
    """True if a table that had rows always has some.

    Not so if a task deletes rows, or only ever adds rows, which are for others to consume.
    """
    return not target.delta_updates and not hard_delete


def claimed(
    task: SinkTask, target: Target, record: TableRecord | None, claim: Claim
) -> TableRecord:
    """Return the record of a table that is claimed."""
    known = None if record is None else record.filled
    filled = target.binding in task.resumed if known is None else known
    return TableRecord(
        state_key=target.state_key, task=task.name, filled=filled and not claim.emptied
    )


def two_checkpoints(task: SinkTask, where: str) -> ConnectorError:
    """Return the error for a renamed task that has stored documents under both names."""
    return ConnectorError(
        f"{task.name} and {task.renamed_from} have both stored documents there",
        where=where,
        why="renamedFrom says that they are one task",
        fix="remove renamedFrom, and give one of them another table",
    )


def _gone(task: SinkTask, name: str) -> ConnectorError:
    return ConnectorError(
        f"table {name} is gone, and {task.name} had filled it",
        why="made anew, it would lack every document that was stored before",
        fix="bring the table back as it was, or raise `backfill` of the binding to fill it anew",
    )


def _lost(task: SinkTask, name: str, what: str, forget: str) -> ConnectorError:
    return ConnectorError(
        f"table {name} {what}",
        why=f"{task.name} goes on behind the documents that it has stored, and they are not there",
        fix="raise `backfill` of the binding to fill it anew; or, if the table does hold what it "
        f"should: {forget}",
    )


def _unknown(task: SinkTask, name: str) -> ConnectorError:
    return ConnectorError(
        f"table {name} has rows of {task.name} that its recovery log does not know",
        why="another data directory has stored them, or the log was lost; everything would count "
        "twice",
        fix="run the task where it was run before, give the binding another table, or raise "
        "`backfill` to fill this one anew",
    )


def _used_before(task: SinkTask, name: str, why: str) -> ConnectorError:
    return ConnectorError(
        f"{task.name} has filled table {name} before under this `backfill` counter",
        why=f"{why}: what was read before would not be read again",
        fix="raise `backfill` of the binding to a number that it never had",
    )


def _foreign(task: SinkTask, name: str, owner: str) -> ConnectorError:
    return ConnectorError(
        f"table {name} belongs to {owner}",
        where=task.name,
        why="two tasks that fill one table count everything twice",
        fix=f"`renamedFrom: {owner if '/' in owner else '…'}` if this task is that one under a new "
        "name; another table; or `takeover: true` in the binding, which empties the table and "
        "fills it anew",
    )
