"""Sessions: the stream that carries nearly all operations.

A unary call costs a Python server some 300 µs, whatever it carries. So each client process opens
one stream and sends in one message what has gathered since its last one; answers are gathered the
same way. With one operation at a time, a message carries one and nothing waits; with many, messages
grow and share their cost.

A client that asks and does not read is held back: no further request is read while more than a
window of its elements are unanswered, and no further head while too many bytes of heads wait to be
sent. An element counts as unanswered until its answer has been sent.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from penstock.consensus.committer import wire
from penstock.consensus.committer.access import check_access, check_write
from penstock.consensus.committer.committer import Caller, PersistCommitter
from penstock.consensus.committer.proto import consensus_pb2 as pb
from penstock.consensus.store import (
    SEQNO_MAX,
    CasResult,
    ConsensusError,
    Determinate,
    ErrorKind,
    Indeterminate,
    VersionedData,
    cause_chain,
)
from penstock.servicekit.rpc.grpcio import Context
from penstock.servicekit.rpc.tokens import Access, Principal
from penstock.servicekit.rpc.unread import Outlet, ReaderGone, SlowReader

log = logging.getLogger("penstock.consensus.committer")

_HEADS_AT_ONCE: Final = 16
"""Heads that one session reads at the same time: each may be as large as an entry may be."""


class ServedSession:
    """One client's stream: batches in, answers out, each as soon as it is known.

    From its opening to its end, a session uses one store: the one that `caller` knows.
    """

    def __init__(
        self,
        committer: PersistCommitter,
        context: Context,
        outlet: Outlet,
        who: Principal,
        caller: Caller,
    ) -> None:
        limits = committer.options.limits
        self._committer = committer
        self._context = context
        self._outlet = outlet
        self._who = who
        self._caller = caller
        self._window = limits.client_inflight_max
        self._unread_max = limits.session_unread_bytes_max
        self._may = None if who.is_unlimited else self._check_write
        self._answers = pb.SessionResponse()
        self._gathered = 0
        """Elements in `_answers`; `_gathered_bytes` counts the bytes of their heads."""
        self._gathered_bytes = 0
        self._unanswered = 0
        self._unread = 0
        self._answered = asyncio.Event()
        self._reading = asyncio.Semaphore(_HEADS_AT_ONCE)
        self._pending = False
        self._writing = False

    async def run(self) -> None:
        """Serve until the client ends its side; raise the error that ends the session before."""
        opened = pb.SessionResponse(window=self._window, incarnation=self._caller.knows)
        await self._outlet.write(opened.SerializeToString())
        broken: ConsensusError | None = None
        try:
            async with asyncio.TaskGroup() as running:
                try:
                    while (request := await self._next()) is not None:
                        self._unanswered += len(request.cas_key) + len(request.head_key)
                        if request.cas_key:
                            running.create_task(self._cas(request))
                        first = request.first + len(request.cas_key)
                        if request.head_key:
                            running.create_task(self._heads(first, request))
                        del request  # it may be large, and the next may be long in coming
                except Determinate as error:
                    broken = error  # what is under way is answered first
        except BaseExceptionGroup as group:
            raise _cause(group) from group
        finally:
            self._committer.unread.add(self._caller.client, -self._gathered_bytes)
        if broken is not None:
            raise broken

    async def _next(self) -> pb.SessionRequest | None:
        """Read the next request; None at the end of the client's side."""
        while self._unanswered >= self._window:
            self._answered.clear()
            await self._answered.wait()
        data = await self._context.read()
        if not isinstance(data, bytes):
            return None
        request = wire.decoded(data, pb.SessionRequest)
        count = len(request.cas_key) + len(request.head_key)
        if count > self._window:
            what = f"a message of a session has {count} operations, {self._window} is the limit"
            raise Determinate(ErrorKind.TOO_LARGE, what)
        if request.first + count > SEQNO_MAX:
            what = f"operations are numbered up to 2^63-1, and not from {request.first}"
            raise Determinate(ErrorKind.INVALID_ARGUMENT, what)
        return request

    async def _cas(self, request: pb.SessionRequest) -> None:
        batch = [
            (key, VersionedData(seqno, data))
            for key, seqno, data in zip(
                request.cas_key, request.cas_seqno, request.cas_data, strict=False
            )
        ]
        missing = len(request.cas_key) - len(batch)
        outcomes: list[CasResult | ConsensusError]
        try:
            outcomes = await self._committer.compare_and_set_each(
                batch, caller=self._caller, may=self._may
            )
        except ConsensusError as error:
            outcomes = [error] * len(batch)
        except Exception as error:
            outcomes = [unexpected(error)] * len(batch)
        outcomes += [
            Determinate(ErrorKind.INVALID_ARGUMENT, "the batch has columns of unequal length")
        ] * missing
        answers = self._answers
        for number, outcome in enumerate(outcomes, request.first):
            if outcome is CasResult.COMMITTED:
                answers.committed.append(number)
            elif outcome is CasResult.EXPECTATION_MISMATCH:
                answers.mismatched.append(number)
            else:
                answers.failed.append(number)
                answers.errors.append(wire.to_error(outcome))
        self._gathered += len(outcomes)
        await self._flush()

    async def _heads(self, first: int, request: pb.SessionRequest) -> None:
        fresh = list(request.head_fresh) + [False] * len(request.head_key)
        asked = [self._head(first + i, key, fresh[i]) for i, key in enumerate(request.head_key)]
        if len(asked) == 1:
            await asked[0]
        else:
            await asyncio.gather(*asked)
        await self._flush()

    async def _head(self, number: int, key: str, fresh: bool) -> None:
        async with self._reading:
            while self._unread >= self._unread_max:
                await self._flush()  # heads found earlier go first
                if self._unread >= self._unread_max:
                    self._answered.clear()
                    await self._answered.wait()
            try:
                check_access(self._who, Access.READ, key)
                if not self._committer.unread.has_room(self._caller.client):
                    await self._flush()  # the client may be waiting for just this
                    await self._committer.unread.room(self._caller.client)
                found = await self._committer.head(key, fresh=fresh, caller=self._caller)
            except ConsensusError as error:
                self._failed(number, error)
            except Exception as error:
                self._failed(number, unexpected(error))
            else:
                self._found(number, found)

    def _found(self, number: int, found: VersionedData | None) -> None:
        self._gathered += 1
        if found is None:
            self._answers.absent.append(number)
            return
        size = len(found.data)
        self._answers.found.append(number)
        self._answers.heads.append(wire.to_versioned(found))
        self._unread += size
        self._gathered_bytes += size
        self._committer.unread.add(self._caller.client, size)

    def _failed(self, number: int, error: ConsensusError) -> None:
        self._gathered += 1
        self._answers.failed.append(number)
        self._answers.errors.append(wire.to_error(error))

    def _check_write(self, key: str) -> None:
        check_write(self._who, key)

    async def _flush(self) -> None:
        """Send the gathered answers; those added meanwhile go in the next message."""
        self._pending = True
        if self._writing:
            return
        self._writing = True
        try:
            while self._pending:
                answers, self._answers = self._answers, pb.SessionResponse()
                count, self._gathered = self._gathered, 0
                size, self._gathered_bytes = self._gathered_bytes, 0
                self._pending = False
                if not count:
                    continue
                message = answers.SerializeToString()
                del answers
                # From here on the message is counted, not the heads it was made of.
                self._committer.unread.add(self._caller.client, -size)
                try:
                    await self._outlet.write(message)
                finally:
                    self._unread -= size
                    self._unanswered -= count
                    self._answered.set()
        finally:
            self._writing = False


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that ended a session: its reader is slow or gone, or a bug."""
    for kind in (SlowReader, ReaderGone):
        if group.subgroup(kind) is not None:
            return kind()
    first: BaseException = group
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return unexpected(first) if isinstance(first, Exception) else first


def unexpected(error: Exception) -> Indeterminate:
    """Return the outcome after a bug: whether it struck before or after the commit is unknown."""
    log.error("operation failed unexpectedly", exc_info=error)
    unknown = Indeterminate(ErrorKind.INTERNAL, f"{type(error).__name__}: {cause_chain(error)}")
    unknown.__cause__ = error
    return unknown
