"""State logs: every durable thing is one of these.

The log of a journal, a task, the catalog or a cluster lives under one key of the consensus store.
Its meaning is a `Machine` (see `replica.py`, where all decisions are); this module reads, sends,
waits, and is the only layer that sends a compare-and-set again after an unknown outcome.

    load         the current state, for readers
    newest_diff  the newest change, without the state
    follow       every state from now on, for readers that stay
    StateLog     a writer's handle: `open` for many writers, `lead` for one leader
    append_all   one command each to several logs, all of them or none, under one revision

**Many writers** (`open`): a writer that loses a slot catches up, decides again on the new state,
and tries the next one. **One leader** (`lead`): taking over appends the next epoch. Only leaders
write such a log, so a slot taken by another writer proves a newer epoch, and the loser is `Fenced`:
no lease, timeout or clock is involved. This does not fence the outside world; an endpoint has to
check the epoch in its own commit.

**Exactly once.** A command is decided, encoded and sent; a lost reply is settled by reading back,
never by assuming. Waiting has no limit here, since giving up would not make the outcome known:
cancel the call instead. A cancelled command may still land. The writer's next command then finds
out, does nothing, and raises `Superseded`, since it was decided without knowing that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from penstock import failpoints
from penstock.consensus.replica import (
    Attempt,
    Author,
    D,
    Fate,
    Machine,
    Replica,
    RollupPolicy,
    S,
    compose,
    diff_of,
    fate_of,
    fate_of_all,
    start_of,
)
from penstock.consensus.store import (
    ATOMIC_BYTES_MAX,
    ENTRY_BYTES_MAX,
    CasResult,
    Consensus,
    ConsensusError,
    Determinate,
    Entry,
    ErrorKind,
    Resync,
    ResyncReason,
)
from penstock.errors import Bug, PenstockError
from penstock.servicekit.rpc.backoff import Backoff

T = TypeVar("T")

_log = logging.getLogger(__name__)

_LOSSES_BEFORE_WAITING = 3
_CONTENTION_S_MAX = 0.25  # other writers make progress, so try again soon

_AFTER_SEND = failpoints.declare(
    "statelog.after-send", "a state-log entry is committed, its writer does not know it yet"
)
_BEFORE_TRUNCATE = failpoints.declare(
    "statelog.before-truncate", "a rollup is committed, what it replaces is not yet truncated"
)


class Fenced(PenstockError):
    """A newer leader has this log. Stop: cancel what is running, write nothing more."""


class Superseded(PenstockError):
    """This command did nothing, because an abandoned earlier one of this writer had landed."""


class OutcomeForgotten(PenstockError):
    """It can no longer be known whether this command landed."""


def _random_id() -> bytes:
    return os.urandom(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Generic[S, D]):
    """A command that is in the log, once and for good."""

    seqno: int
    diff: D
    state: S
    """The state right after it; the log may be further by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed(Generic[S, D]):
    """A state of a followed log. `diff` led to it; None after a jump, or if the entry had none."""

    replica: Replica[S, D]
    diff: D | None
    jumped: bool
    """Entries between this state and the one before were not seen: the start, or a resync."""


# -------------------------------------------------------------------------------------- readers


async def load(store: Consensus, key: str, machine: Machine[S, D]) -> Replica[S, D]:
    """Load the current state: one head, one scan from the newest rollup, however old the log."""
    return await _catch_up(store, Replica.empty(key, machine))


async def newest_diff(store: Consensus, key: str, machine: Machine[S, D]) -> D | None:
    """Return the diff of the newest entry of a log; None if there is no entry or no diff.

    Reads one head and folds nothing.
    """
    backoff = Backoff()
    while True:
        try:
            head = await store.head(key, fresh=True)
            return None if head is None else diff_of(key, head, machine)
        except ConsensusError as error:
            if error.kind.final:
                raise
            await _wait(backoff, key, error)


async def follow(
    store: Consensus, key: str, machine: Machine[S, D]
) -> AsyncIterator[Followed[S, D]]:
    """Yield the current state, then the state after every further entry, until stopped."""
    seen = -1
    while True:
        replica = await load(store, key, machine)
        if replica.seqno < seen:
            raise _gone_back(key, seen)
        yield Followed(replica=replica, diff=None, jumped=True)
        async with closing(store.subscribe(key, replica.seqno + 1)) as events:
            async for event in events:
                match event:
                    case Entry(versioned) if versioned.seqno > replica.seqno:
                        replica, diff = replica.advance(versioned)
                        if replica.newer is not None:
                            raise replica.newer
                        yield Followed(replica=replica, diff=diff, jumped=False)
                    case Resync(reason=ResyncReason.STORE_RESET):
                        raise _gone_back(key, replica.seqno)
                    case _:
                        pass
        seen = replica.seqno


# -------------------------------------------------------------------------------------- writers


@dataclass(slots=True, kw_only=True, eq=False)
class StateLog(Generic[S, D]):
    """A writer's handle on one log, made by `open` or `lead`. Its commands queue up.

    Fields are for reading; `append` is what changes them.
    """

    store: Consensus
    replica: Replica[S, D]
    """As of the last append; another writer may be further. It does not know the
    revisions of what this handle wrote, unless it is `confirmed`."""
    policy: RollupPolicy
    leads: int | None = None
    """The epoch this handle leads; what a leader gives to endpoints, to check in their commits."""
    writer: bytes = field(default_factory=_random_id)
    writer_seq: int = 1
    """Number of the next command. It counts up when a caller learns of success, not before: an
    entry in the log with this number is a command that its caller abandoned."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _settled: Replica[S, D] | None = None
    """The last confirmed replica, while `replica` is not; `confirm` reads on from it."""

    @classmethod
    async def open(
        cls,
        store: Consensus,
        key: str,
        machine: Machine[S, D],
        *,
        policy: RollupPolicy = RollupPolicy(),  # noqa: B008 - frozen
    ) -> StateLog[S, D]:
        """Open a log as one of many writers."""
        return cls(store=store, replica=await load(store, key, machine), policy=policy)

    @classmethod
    async def lead(
        cls,
        store: Consensus,
        key: str,
        machine: Machine[S, D],
        *,
        claim: Callable[[S], D | None] = lambda _: None,
        policy: RollupPolicy = RollupPolicy(),  # noqa: B008 - frozen
    ) -> StateLog[S, D]:
        """Open a log as its leader: append the next epoch, which fences the leader before.

        A commit of an older leader is either before that entry, and part of the state here, or it
        never happens. `claim` returns a diff for the same entry; it raises to leave the log to its
        leader, as `decide` of `append` does.
        """
        log = await cls.open(store, key, machine, policy=policy)
        takeover = await _commit_one(
            log, lambda replica: _Change(diff=claim(replica.state), epoch=replica.epoch + 1)
        )
        log.leads = takeover.author.epoch
        return log

    @property
    def key(self) -> str:
        return self.replica.key

    @property
    def state(self) -> S:
        return self.replica.state

    async def append(self, decide: Callable[[S], D | None]) -> Committed[S, D] | None:
        """Commit the diff that `decide` returns for the state it will be applied to.

        `decide` is called again each time another writer was faster. It returns None if there is
        nothing to do, and raises to refuse; both are answers about the current state, so they
        stand only after a fresh read.
        """
        [committed] = await append_all([Command(self, decide)])
        return committed

    async def settled(self) -> S:
        """Return a state that knows the revision of every entry; other writers may be further."""
        async with self.lock:
            await self.confirm()
            return self.state

    async def catch_up(self) -> None:
        """Read what others have committed since. The caller must hold the lock."""
        self.replica = await _catch_up(self.store, self.replica)

    async def confirm(self) -> None:
        """Learn the revisions of what this handle wrote. The caller must hold the lock.

        Only those entries are read back, however much the log holds below them.
        """
        if not self.replica.confirmed:
            before = self._settled or Replica.empty(self.key, self.replica.machine)
            self.replica = await _catch_up(self.store, before)
            self._settled = None

    def advance(self, after: Replica[S, D]) -> None:
        """Move to the replica of a committed attempt. The caller must hold the lock."""
        if self.replica.confirmed:
            self._settled = self.replica
        self.replica = after

    def check_standing(self) -> None:
        """Raise if this handle is fenced, or an abandoned command of its own has landed."""
        if self.leads is not None and self.replica.epoch != self.leads:
            raise Fenced(
                f"epoch {self.leads} is over: epoch {self.replica.epoch} leads this log",
                where=f"{self.key}, entry {self.replica.seqno}",
                fix="stop, and recover from the log if this task is to be led again",
            )
        mark = self.replica.marks.get(self.writer)
        if mark is not None and mark.writer_seq >= self.writer_seq:
            self.writer_seq = mark.writer_seq + 1
            raise Superseded(
                "an earlier command, given up by its caller, has landed",
                where=f"{self.key}, entry {mark.seqno}",
                why="its outcome was unknown when it was cancelled",
                fix="look at the state, and decide again",
            )


@dataclass(frozen=True, slots=True)
class Command(Generic[S, D]):
    """One log's part of `append_all`; `decide` as in `StateLog.append`."""

    log: StateLog[S, D]
    decide: Callable[[S], D | None]
    roll_up: bool = False
    """The entry carries the state in any case: for a diff that makes the state smaller."""


async def append_all(commands: Sequence[Command[Any, Any]]) -> list[Committed[Any, Any] | None]:
    """Commit one command on each of several logs of one store: all of them, or none.

    Logs with nothing to do stay out of it; the others commit under one revision, within the
    limits of `Consensus.compare_and_set_all`.
    """
    attempts = await _commit(
        [_Proposal(c.log, _by_state(c.decide), roll_up=c.roll_up) for c in commands]
    )
    if len(commands) > 1:
        for command, attempt in zip(commands, attempts, strict=True):
            if attempt is not None and attempt.rollup_skipped:
                await _roll_up(command.log)
    return [
        Committed(seqno=attempt.new.seqno, diff=attempt.diff, state=attempt.after.state)
        if attempt is not None
        else None
        for attempt in attempts
    ]


# --------------------------------------------------------------------------- committing, settling


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change(Generic[D]):
    """The content of an entry."""

    diff: D | None
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class _Proposal(Generic[S, D]):
    """A command before its slot and its state are known."""

    log: StateLog[S, D]
    change: Callable[[Replica[S, D]], _Change[D] | None]
    roll_up: bool = False

    async def prepare(self) -> None:
        """Read back what this handle wrote, if the next entry may be a rollup of it."""
        log = self.log
        if self.roll_up or log.policy.may_be_due(log.replica.diffs_since):
            await log.confirm()

    def compose(self, token: bytes, *, bytes_max: int) -> Attempt[S, D] | None:
        log = self.log
        change = self.change(log.replica)
        if change is None:
            return None
        author = Author(
            writer=log.writer,
            writer_seq=log.writer_seq,
            token=token,
            epoch=log.replica.epoch if change.epoch is None else change.epoch,
            wall_ms=time.time_ns() // 1_000_000,
        )
        return compose(
            log.replica,
            author,
            change.diff,
            policy=log.policy,
            bytes_max=bytes_max,
            force_rollup=self.roll_up,
        )


_Offers = list[tuple[StateLog[Any, Any], Attempt[Any, Any]]]


async def _commit(proposals: Sequence[_Proposal[Any, Any]]) -> list[Attempt[Any, Any] | None]:
    """Return what each proposal committed, None where there was nothing to do.

    Locks are taken in the order of keys, so two batches cannot wait for each other.
    """
    logs = sorted((proposal.log for proposal in proposals), key=lambda log: log.key)
    if len({log.key for log in logs}) < len(logs):
        raise ValueError("a log appears twice in one batch")
    async with contextlib.AsyncExitStack() as held:
        for log in logs:
            await held.enter_async_context(log.lock)
        attempts = await _land(proposals)
        for log, attempt in _offers(proposals, attempts):
            await _truncate(log, attempt)
            if attempt.rollup_skipped and len(proposals) == 1:
                what = "the state of %s has more than %d bytes: no rollup, and its log grows"
                _log.error(what, log.key, log.policy.bytes_max)
        # Last, and without an await: from here on the caller will learn of it.
        for log, _ in _offers(proposals, attempts):
            log.writer_seq += 1
    return attempts


async def _land(proposals: Sequence[_Proposal[Any, Any]]) -> list[Attempt[Any, Any] | None]:
    """Decide and offer until it has landed, or there is nothing to do on a current state."""
    token = _random_id()
    current = False
    losses, backoff = 0, Backoff(clamp_s=_CONTENTION_S_MAX)
    while True:
        for proposal in proposals:
            await proposal.prepare()
            proposal.log.check_standing()
        try:
            attempts = _compose(proposals, token)
        except Exception:
            if current:
                raise
            attempts = [None] * len(proposals)
        if not current and None in attempts:
            for proposal in proposals:
                await proposal.log.catch_up()
            current = True
            continue
        offers = _offers(proposals, attempts)
        if not offers or await _offer(offers):
            return attempts
        current = True  # losing a slot includes catching up
        losses += 1
        if losses >= _LOSSES_BEFORE_WAITING:
            await asyncio.sleep(random.random() * backoff.next_s())  # noqa: S311 - spreads writers
            for proposal in proposals:
                await proposal.log.catch_up()


def _compose(
    proposals: Sequence[_Proposal[Any, Any]], token: bytes
) -> list[Attempt[Any, Any] | None]:
    """Compose one attempt each; a batch carries those rollups that fit beside its diffs."""
    if len(proposals) == 1:
        return [proposals[0].compose(token, bytes_max=ENTRY_BYTES_MAX)]
    attempts = [proposal.compose(token, bytes_max=0) for proposal in proposals]
    left = ATOMIC_BYTES_MAX - sum(len(attempt.new.data) for attempt in attempts if attempt)
    for index, attempt in enumerate(attempts):
        if attempt is not None and attempt.rollup_skipped:
            size = len(attempt.new.data)
            attempts[index] = again = proposals[index].compose(token, bytes_max=left + size)
            left -= len(again.new.data) - size if again else 0
    return attempts


async def _offer(offers: _Offers) -> bool:
    """Send attempts, all or none, until it is known whether they landed; False if they lost.

    After an unknown outcome the same bytes go to the same slot again: of two equal entries only
    one can have it. Other bytes, or another slot, would be a second command.
    """
    backoff = Backoff()
    while True:
        result: CasResult | None = None
        try:
            result = await _send(offers)
        except ConsensusError as error:
            if error.kind.final:
                raise
            await _wait(backoff, offers[0][0].key, error)
            if isinstance(error, Determinate):
                continue
        if result is CasResult.COMMITTED:
            failpoints.hit(_AFTER_SEND)
            for log, attempt in offers:
                log.advance(attempt.after)
            return True
        for log, _ in offers:
            await log.catch_up()
            if log.replica.newer is not None:
                raise log.replica.newer
        match fate_of_all([fate_of(log.replica, a.author, a.new.seqno) for log, a in offers]):
            case Fate.LANDED:
                for log, attempt in offers:
                    if log.replica.seqno < attempt.new.seqno:  # read before the others landed
                        await log.catch_up()
                return True
            case Fate.LOST | Fate.SUPERSEDED:
                return False  # composing again tells them apart
            case Fate.FORGOTTEN:
                for log, _ in offers:
                    log.writer_seq += 1
                raise OutcomeForgotten(
                    "it cannot be known any more whether this command landed",
                    where=f"{offers[0][0].key}, entry {offers[0][1].new.seqno}",
                    why="since it was sent, more writers came than a log remembers",
                    fix="look at the state, and decide again",
                )
            case Fate.OPEN if result is not None:
                # A mismatch, and yet the slot is free: the head must be below what we have seen.
                raise _gone_back(offers[0][0].key, offers[0][0].replica.seqno)
            case Fate.OPEN:
                pass


async def _send(offers: _Offers) -> CasResult:
    store = offers[0][0].store
    if len(offers) == 1:
        [(log, attempt)] = offers
        return await store.compare_and_set(log.key, attempt.new)
    return await store.compare_and_set_all([(log.key, attempt.new) for log, attempt in offers])


async def _truncate(log: StateLog[Any, Any], attempt: Attempt[Any, Any]) -> None:
    """Truncate what a rollup replaced. A failure is left to the next rollup, which drops more."""
    if attempt.truncate_to is None:
        return
    failpoints.hit(_BEFORE_TRUNCATE)
    try:
        await log.store.truncate(log.key, attempt.truncate_to)
    except ConsensusError as error:
        _log.debug("truncating %s to %d: %s", log.key, attempt.truncate_to, error.message)


async def _roll_up(log: StateLog[Any, Any]) -> None:
    """Make up for a rollup that did not fit beside the other commands of a batch."""
    with contextlib.suppress(PenstockError):  # its command is committed; the next meets the error
        await _commit([_Proposal(log, lambda _: _Change(diff=None), roll_up=True)])


async def _commit_one(
    log: StateLog[S, D], change: Callable[[Replica[S, D]], _Change[D]]
) -> Attempt[S, D]:
    [attempt] = await _commit([_Proposal(log, change)])
    if attempt is None:
        raise Bug("an unconditional entry was not written", where=log.key)
    return attempt


def _by_state(
    decide: Callable[[S], D | None],
) -> Callable[[Replica[S, D]], _Change[D] | None]:
    def change(replica: Replica[S, D]) -> _Change[D] | None:
        diff = decide(replica.state)
        return None if diff is None else _Change(diff=diff)

    return change


def _offers(
    proposals: Sequence[_Proposal[Any, Any]], attempts: Sequence[Attempt[Any, Any] | None]
) -> _Offers:
    return [(p.log, a) for p, a in zip(proposals, attempts, strict=True) if a is not None]


# ------------------------------------------------------------------------------ reading, patience


async def _catch_up(store: Consensus, replica: Replica[S, D]) -> Replica[S, D]:
    """Bring `replica` up to everything that is committed; retries until the store answers."""
    backoff = Backoff()
    while True:
        try:
            start = replica.seqno + 1
            if start == 0:
                head = await store.head(replica.key, fresh=True)
                if head is None:
                    return replica
                start = start_of(replica.key, head)
            return replica.catch_up(await store.scan(replica.key, start))
        except ConsensusError as error:
            if error.kind.final:
                raise
            await _wait(backoff, replica.key, error)


async def _wait(backoff: Backoff, key: str, error: ConsensusError) -> None:
    level = logging.DEBUG if error.kind is ErrorKind.CONFLICT else backoff.level
    _log.log(level, "%s: attempt %d: %s", key, backoff.attempts, error.message)
    await backoff.wait()


@contextlib.asynccontextmanager
async def closing(events: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """End a subscription with its reader, not when it is garbage-collected."""
    try:
        yield events
    finally:
        if isinstance(events, AsyncGenerator):
            await events.aclose()


def _gone_back(key: str, seqno: int) -> Determinate:
    return Determinate(
        ErrorKind.STORE_RESET, f"{key} had entry {seqno}, and its head is below that now"
    )
