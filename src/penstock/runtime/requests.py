"""Requests to a task from another process: one small state log per task.

`close-now` is for the process that runs the task now: the log counts such requests, the process
acts on counts that grow meanwhile, and requests to a task that was not running are forgotten.

`stop` is durable: the log holds since when the task is kept from running, until `start` takes that
back. A process that runs the task ends it at its next transaction boundary; one that is about to
run it does not, or waits for `start` if it runs tasks for ever.

`backfill` is durable too: the log holds the time of the last request for each resource of a task.
The session that finds a request which its recovery log has not met yet meets it, exactly once; one
that runs ends for that, and the next one follows. `takeover` is such a request for a resource that
may belong to another task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from penstock.consensus.replicas import load_all
from penstock.consensus.statelog import StateLog, follow
from penstock.consensus.statelog import load as load_log
from penstock.consensus.store import Consensus

CLOSE_NOW: Final = "close-now"
STOP: Final = "stop"
START: Final = "start"
BACKFILL: Final = "backfill"
TAKEOVER: Final = "takeover"

_PREFIX: Final = "request/"


class Obeys(Protocol):
    """Something that can be asked to close its open transaction, and to stop."""

    def close_now(self) -> None: ...

    def stop_for_now(self) -> None: ...

    def begin_anew(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Refills:
    """The resources of a task that are to be filled again: the last request for each."""

    requests: Mapping[str, int] = field(default_factory=dict)
    takeovers: frozenset[str] = frozenset()
    """Those that may be another task's."""


@dataclass(frozen=True, slots=True)
class _Machine:
    """Counts requests by name; under `stop` is the Unix time since which the task is stopped."""

    format: int = 1

    def initial(self) -> dict[str, int]:
        return {}

    def apply(self, state: dict[str, int], diff: str, revision: int) -> dict[str, int]:
        what, _, at = diff.partition(" ")
        if what == STOP:
            return {**state, STOP: int(at)}
        if what in (BACKFILL, TAKEOVER):
            number, _, resource = at.partition(" ")
            others = {k: v for k, v in state.items() if k != f"{TAKEOVER} {resource}"}
            taken = {f"{TAKEOVER} {resource}": int(number)} if what == TAKEOVER else {}
            return {**others, **taken, f"{BACKFILL} {resource}": int(number)}
        if what == START:
            return {name: count for name, count in state.items() if name != STOP}
        return {**state, what: state.get(what, 0) + 1}

    def encode_diff(self, diff: str) -> bytes:
        return diff.encode()

    def decode_diff(self, data: bytes, format: int) -> str:  # noqa: A002
        return data.decode()

    def encode_state(self, state: dict[str, int]) -> bytes:
        return msgspec.json.encode(state, order="deterministic")

    def decode_state(self, data: bytes, format: int, revision: int) -> dict[str, int]:  # noqa: A002
        return msgspec.json.decode(data, type=dict[str, int])


def _key(task: str) -> str:
    return f"{_PREFIX}{task}"


async def close_now(store: Consensus, task: str) -> None:
    """Ask the process that runs the task now to close its open transaction."""
    log = await StateLog.open(store, _key(task), _Machine())
    await log.append(lambda _: CLOSE_NOW)


async def refill(
    store: Consensus, task: str, resources: Sequence[str], *, at: int, takeover: bool = False
) -> None:
    """Ask that resources are filled again; `at` tells this request from all others."""
    log = await StateLog.open(store, _key(task), _Machine())
    what = TAKEOVER if takeover else BACKFILL
    for resource in resources:
        diff = f"{what} {at} {resource}"
        await log.append(lambda _, diff=diff: diff)  # type: ignore[misc]


async def refills(store: Consensus, *tasks: str | None) -> Refills:
    """Return what is asked of a task, under its name or a former one; the first counts more."""
    found: dict[str, int] = {}
    takeovers: set[str] = set()
    for task in reversed([each for each in tasks if each is not None]):
        state = (await load_log(store, _key(task), _Machine())).state
        for key, number in state.items():
            what, _, resource = key.partition(" ")
            if what == BACKFILL:
                found[resource] = number
            elif what == TAKEOVER:
                takeovers.add(resource)
    return Refills(found, frozenset(takeovers))


async def stop(store: Consensus, task: str, *, at: int) -> bool:
    """Keep the task from running; false if it was kept already."""
    log = await StateLog.open(store, _key(task), _Machine())
    return await log.append(lambda state: None if STOP in state else f"{STOP} {at}") is not None


async def start(store: Consensus, task: str) -> bool:
    """Let the task run again; false if it was not stopped."""
    log = await StateLog.open(store, _key(task), _Machine())
    return await log.append(lambda state: START if STOP in state else None) is not None


async def stopped_since(store: Consensus, task: str) -> int | None:
    """Return since when the task is stopped; None if it may run."""
    return (await load_log(store, _key(task), _Machine())).state.get(STOP)


async def all_stopped(store: Consensus) -> dict[str, int]:
    """Return the tasks that are stopped, and since when."""
    loaded = await load_all(store, _PREFIX, _Machine())
    return {
        key.removeprefix(_PREFIX): replica.state[STOP]
        for key, replica in loaded.replicas.items()
        if STOP in replica.state
    }


async def until_started(store: Consensus, task: str) -> None:
    """Wait until the task may run."""
    async with aclosing(follow(store, _key(task), _Machine())) as states:  # type: ignore[type-var]
        async for followed in states:
            if STOP not in followed.replica.state:
                return


async def obey(store: Consensus, task: str, control: Obeys) -> None:
    """Do what is asked of a task, until cancelled."""
    known: dict[str, int] | None = None
    async with aclosing(follow(store, _key(task), _Machine())) as states:  # type: ignore[type-var]
        async for followed in states:
            asked = followed.replica.state
            if known is not None and asked.get(CLOSE_NOW, 0) > known.get(CLOSE_NOW, 0):
                control.close_now()
            if known is not None and _refills(asked) != _refills(known):
                control.begin_anew()
            if STOP in asked:
                control.stop_for_now()
            known = asked


def _refills(state: Mapping[str, int]) -> dict[str, int]:
    return {key: number for key, number in state.items() if key.startswith(f"{BACKFILL} ")}
