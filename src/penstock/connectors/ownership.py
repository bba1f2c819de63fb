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
    rebuild: str | None = None
    """The state key under which a shadow table is filled; the record is about the visible one."""


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
    under_way: bool = False
    """True if a shadow table is filled already to replace them."""
    rebuilds: bool = False
    """True if they stay until a shadow table replaces them."""
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
    if record is None:
        if resumed and not found.there:
            raise _gone(task, target)
        return Claim()
    if record.rebuild == target.state_key and record.task == task.name:
        return Claim(emptied=True, under_way=True)
    if record.task is None and not resumed and was is None:  # of an older release
        if found.there and not found.is_empty() and not target.takeover:
            raise _foreign(task, target, "another task")
        return Claim(emptied=target.takeover or record.state_key != target.state_key)
    if record.task is not None and record.task != task.name:
        if found.there and not target.takeover:
            raise _foreign(task, target, record.task)
        if resumed:
            raise _used_before(task, target, f"{record.task} has filled it since")
        return Claim(emptied=True, taken_from=record.task)
    if record.state_key != target.state_key:
        if resumed:
            raise _used_before(task, target, f"it was filled under {record.state_key} since")
        return Claim(emptied=True)
    filled = resumed if record.filled is None else record.filled
    if filled and not found.there:
        raise _gone(task, target)
    if (
        filled
        and None not in (record.identity, found.identity)
        and record.identity != found.identity
    ):
        raise _lost(
            task, target, "is not the table that was filled, but another in its place", forget
        )
    if record.filled and found.there and not resumed and not found.is_empty():
        raise _unknown(task, target)
    if record.filled and found.there and keeps_rows(target, hard_delete) and found.is_empty():
        raise _lost(task, target, "is empty, and had rows", forget)
    return Claim()


def keeps_rows(target: Target, hard_delete: bool) -> bool:
    """True if a table that had rows always has some.

    Not so if a task deletes rows, or only ever adds rows, which are for others to consume.
    """
    return not target.delta_updates and not hard_delete


def claimed(
    task: SinkTask, target: Target, record: TableRecord | None, claim: Claim
) -> TableRecord:
    """Return the record of a table that is claimed, and holds what is stored from now on."""
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


def gone_shadow(task: SinkTask, target: Target) -> ConnectorError:
    """Return the error for a shadow table that has rows according to the recovery log."""
    return ConnectorError(
        f"the shadow table in which {task.name} rebuilds {_named(target)} is gone",
        why="made anew, it would lack what was stored there before",
        fix=f"start the rebuild again: {_backfill(task, target)}",
    )


def _named(target: Target) -> str:
    return ".".join(target.path)


def _backfill(task: SinkTask, target: Target) -> str:
    return f"penstock backfill {task.name} --binding {target.binding}"


def _gone(task: SinkTask, target: Target) -> ConnectorError:
    return ConnectorError(
        f"table {_named(target)} is gone, and {task.name} had filled it",
        why="made anew, it would lack every document that was stored before",
        fix="bring the table back as it was, or raise `backfill` of the binding to fill it anew: "
        f"{_backfill(task, target)}",
    )


def _lost(task: SinkTask, target: Target, what: str, forget: str) -> ConnectorError:
    return ConnectorError(
        f"table {_named(target)} {what}",
        why=f"{task.name} goes on behind the documents that it has stored, and they are not there",
        fix="raise `backfill` of the binding to fill it anew: "
        f"{_backfill(task, target)}; or, if the table does hold what it should: {forget}",
    )


def _unknown(task: SinkTask, target: Target) -> ConnectorError:
    return ConnectorError(
        f"table {_named(target)} has rows of {task.name} that its recovery log does not know",
        why="another data directory has stored them, or the log was lost; everything would count "
        "twice",
        fix="run the task where it was run before, give the binding another table, or raise "
        f"`backfill` to fill this one anew: {_backfill(task, target)}",
    )


def _used_before(task: SinkTask, target: Target, why: str) -> ConnectorError:
    return ConnectorError(
        f"{task.name} has filled table {_named(target)} before under this `backfill` counter",
        why=f"{why}: what was read before would not be read again",
        fix="raise `backfill` of the binding to a number that it never had: "
        f"{_backfill(task, target)}",
    )


def _foreign(task: SinkTask, target: Target, owner: str) -> ConnectorError:
    return ConnectorError(
        f"table {_named(target)} belongs to {owner}",
        where=task.name,
        why="two tasks that fill one table count everything twice",
        fix=f"`renamedFrom: {owner if '/' in owner else '…'}` if this task is that one under a new "
        f"name; another table; or penstock task takeover {task.name} --table {_named(target)}, "
        "which fills the table anew",
    )
