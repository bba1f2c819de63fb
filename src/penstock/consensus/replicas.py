"""Many state logs as one: everything under a prefix, loaded and followed together.

    load_all     the current state of every log, as of one revision
    follow_all   that, and then every change, revision by revision

A follower of ten thousand logs holds one stream, not ten thousand. It is exact: after each `Moved`,
its states are those that a fresh load would have found at that revision, for every log at once. So
what was committed together is seen together, and nothing that was committed later.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Generic

from penstock.consensus.replica import D, Machine, Replica, S
from penstock.consensus.statelog import closing
from penstock.consensus.store import (
    Consensus,
    ConsensusError,
    Entries,
    Live,
    VersionedData,
    WatchProgress,
    WatchResync,
)
from penstock.garbage import gc_paused
from penstock.servicekit.rpc.backoff import Backoff

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[S, D]):
    """Every log under a prefix, by key, as of one revision."""

    revision: int
    replicas: dict[str, Replica[S, D]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(Generic[S]):
    """The followed logs are known up to `revision`."""

    revision: int
    changed: Mapping[str, S]
    """The states that changed since the `Moved` before, by key; all of them at first."""
    jumped: bool
    """The revisions since the `Moved` before were not seen one by one: the start, or a reader that
    fell so far behind that entries were truncated meanwhile."""


async def load_all(store: Consensus, prefix: str, machine: Machine[S, D]) -> Loaded[S, D]:
    """Load the current state of every log under `prefix`; retries until the store answers."""
    backoff = Backoff()
    while True:
        replicas: dict[str, Replica[S, D]] = {}
        try:
            async with closing(store.snapshot(prefix)) as events:
                async for event in events:
                    match event:
                        case Live(entries):
                            _fold(replicas, entries, machine)
                        case WatchProgress(revision):
                            return Loaded(revision=revision, replicas=replicas)
        except ConsensusError as error:
            await _patience(error, prefix, backoff)


async def follow_all(
    store: Consensus, prefix: str, machine: Machine[S, D]
) -> AsyncGenerator[Moved[S], None]:
    """Yield every state under `prefix`, then those that change, until the caller stops.

    Where truncation went past this reader, everything is loaded anew: a lost entry of one log may
    have been committed together with a remaining entry of another.
    """
    known: dict[str, Replica[S, D]] = {}
    backoff = Backoff()
    while True:
        loaded = await load_all(store, prefix, machine)
        changed = {
            key: replica.state
            for key, replica in loaded.replicas.items()
            if key not in known or known[key].seqno != replica.seqno
        }
        known, revision = loaded.replicas, loaded.revision
        yield Moved(revision=revision, changed=changed, jumped=True)
        lost = False
        while not lost:
            try:
                async with closing(store.watch(prefix, revision)) as events:
                    async for event in events:
                        backoff.reset()
                        match event:
                            case Entries(revision, entries):
                                keys = _fold(known, entries, machine)
                                states = {key: known[key].state for key in keys}
                                yield Moved(revision=revision, changed=states, jumped=False)
                            case WatchProgress(upto) if upto > revision:
                                revision = upto
                                yield Moved(revision=revision, changed={}, jumped=False)
                            case WatchProgress():
                                pass
                            case WatchResync():
                                lost = True
                                break
            except ConsensusError as error:
                await _patience(error, prefix, backoff)


@gc_paused()
def _fold(
    replicas: dict[str, Replica[S, D]],
    entries: Iterable[tuple[str, VersionedData]],
    machine: Machine[S, D],
) -> list[str]:
    """Bring the replicas of the keys in `entries` up to date; return these keys."""
    keys = []
    for key, group in groupby(entries, itemgetter(0)):
        replica = replicas.get(key) or Replica.empty(key, machine)
        replicas[key] = replica = replica.catch_up([entry for _, entry in group])
        if replica.newer is not None:
            raise replica.newer
        keys.append(key)
    return keys


async def _patience(error: ConsensusError, prefix: str, backoff: Backoff) -> None:
    if error.kind.final:
        raise error
    _log.log(backoff.level, "%s*: attempt %d: %s", prefix, backoff.attempts, error.message)
    await backoff.wait()
