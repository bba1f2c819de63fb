"""Takes over the recovery log of a task, also of one that goes on under another name.

A recovery log has the name of its task in its key. A task that was renamed takes the log of its old
name over, in two steps, each of which can be the last one before a crash:

1. The old log is led, which fences a leader that ran the task by its old name, and says that it has
   moved (`moved-to`). From here on it never changes, and no leader runs by the old name.
2. The new log becomes a copy of it, and says whose (`renamed-from`).

Both name the epoch of step 1, so a task can be renamed back: only the newest move counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from penstock import failpoints
from penstock.consensus.statelog import StateLog
from penstock.consensus.statelog import load as load_log
from penstock.consensus.store import Consensus
from penstock.errors import UserError
from penstock.runtime.recovery import (
    LEADER,
    Entries,
    Op,
    RecoveryMachine,
    has_progress,
    recovery_key,
    task_of,
)

Log = StateLog[Entries, tuple[Op, ...]]

_MOVED_TO: Final = b"moved-to"
_RENAMED_FROM: Final = b"renamed-from"

_MOVED = failpoints.declare("rename.after-moved", "the log of the old name says that it has moved")
_TAKEN = failpoints.declare("rename.after-taken", "the log of the new name is a copy of the old")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, int]).decode


Claim = Callable[[Entries], tuple[Op, ...]]
"""What the entry that takes a log over says, decided on its state; raises to leave it alone."""


async def lead(
    store: Consensus, task: str, *, claim: Claim = lambda _: (), renamed_from: str | None = None
) -> Log:
    """Take the task's recovery log over, and that of its old name before; raises `UserError`."""
    move = None if renamed_from is None else await _moved(store, renamed_from, task, claim)
    log: Log = await StateLog.lead(store, recovery_key(task), RecoveryMachine(), claim=claim)
    if move is not None and renamed_from is not None:
        origin = (renamed_from, move[1])
        if _read(log.state, _RENAMED_FROM) != origin:
            await log.append(lambda state: (*_copy(move[0], origin), *claim(state)))
            failpoints.hit(_TAKEN)
    if (moved := _read(log.state, _MOVED_TO)) is not None:
        new = task_of(moved[0])
        raise UserError(
            f"{task_of(task)} goes on as {new}",
            why="it was renamed, and two tasks would store everything twice",
            fix=f"run {new}; give this one another name; or go back with `renamedFrom: {new}`",
        )
    return log


async def _moved(store: Consensus, old: str, new: str, claim: Claim) -> tuple[Entries, int] | None:
    """The log of the old name, which has moved to the new one, and the epoch in which it did.

    None if nothing ever ran by the old name.
    """
    found = await load_log(store, recovery_key(old), RecoveryMachine())
    if not found.state.keys() - {LEADER}:
        return None
    if _read(found.state, _MOVED_TO) is None:
        await _check_unused(store, new, old)
        log: Log = await StateLog.lead(store, recovery_key(old), RecoveryMachine(), claim=claim)
        epoch = log.leads or 0
        await log.append(
            lambda state: (
                None if _MOVED_TO in state else (("put", _MOVED_TO, _encode((new, epoch))),)
            )
        )
        failpoints.hit(_MOVED)
        state = log.state
    else:
        state = found.state
    moved = _read(state, _MOVED_TO)
    if moved is None or moved[0] != new:
        raise UserError(
            f"{task_of(old)} was renamed to {task_of(moved[0]) if moved else 'another'} already",
            where=f"{task_of(new)}: renamedFrom",
            fix="name the last of its names",
        )
    return state, moved[1]


async def _check_unused(store: Consensus, new: str, old: str) -> None:
    state = (await load_log(store, recovery_key(new), RecoveryMachine())).state
    if _MOVED_TO not in state and has_progress(state):
        raise UserError(
            f"{task_of(new)} has stored documents of its own, and {task_of(old)} has too",
            where=f"{task_of(new)}: renamedFrom",
            why="what two tasks have read cannot be joined",
            fix="remove renamedFrom, or give the task a name that is new",
        )


def _copy(state: Entries, origin: tuple[str, int]) -> tuple[Op, ...]:
    """The record that makes any log a copy of this one."""
    return (
        ("del-prefix", b"", b""),
        *(
            ("put", key, value)
            for key, value in sorted(state.items())
            if key not in (_MOVED_TO, _RENAMED_FROM, LEADER)
        ),
        ("put", _RENAMED_FROM, _encode(origin)),
    )


def _read(state: Entries, key: bytes) -> tuple[str, int] | None:
    value = state.get(key)
    return None if value is None else _decode(value)
