"""The client's end of a session: compare-and-sets and heads that gather are sent together.

Operations that arrive while a message is being written go in the next one. So a lone operation is
sent at once, and many share the cost of a message, in both directions, without a timer.

When the stream breaks, each caller gets an exact answer:

- an operation not sent yet stays, and goes when there is a stream again; past its deadline it is
  `Determinate`, since the committer never saw it;
- a compare-and-set that was sent is `Indeterminate`. It is never sent again: only the state log
  can find out whether it happened;
- a head that was sent is asked again; reading has no side effects.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.consensus.committer import wire
from penstock.consensus.committer.proto import consensus_pb2 as pb
from penstock.consensus.store import (
    CasResult,
    ConsensusError,
    Determinate,
    ErrorKind,
    Indeterminate,
    VersionedData,
)
from penstock.servicekit.logs import fields
from penstock.servicekit.rpc.backoff import RECONNECT_CLAMP_S, Backoff
from penstock.servicekit.rpc.grpcio import aio, grpc

log = logging.getLogger("penstock.consensus.committer")

Stream = aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]

_SWEEP_S = 0.25


@dataclass(slots=True, eq=False)
class _Asked:
    """An operation and the future of its caller; `new` is None for a head."""

    key: str
    new: VersionedData | None
    fresh: bool
    deadline: float
    answer: asyncio.Future[Any]


class Pipe:
    """One session at a time, opened when there is something to send; lives on one event loop."""

    def __init__(
        self,
        connect: Callable[[], Stream],
        *,
        pinned: Callable[[], bytes],
        pin: Callable[[bytes], None],
        target: str,
    ) -> None:
        self._connect = connect
        self._pinned = pinned
        self._pin = pin
        self._target = target
        self._unsent: deque[_Asked] = deque()
        self._sent: dict[int, _Asked] = {}
        self._next_number = 0
        self._window = 0
        self._wake = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False

    async def compare_and_set(self, key: str, new: VersionedData, timeout_s: float) -> CasResult:
        result: CasResult = await self._ask(key, new, False, timeout_s)
        return result

    async def head(self, key: str, *, fresh: bool, timeout_s: float) -> VersionedData | None:
        found: VersionedData | None = await self._ask(key, None, fresh, timeout_s)
        return found

    async def close(self) -> None:
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        self._abandon(Determinate(ErrorKind.UNAVAILABLE, "the client was closed"), all_of_it=True)

    def _ask(
        self, key: str, new: VersionedData | None, fresh: bool, timeout_s: float
    ) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._unsent.append(_Asked(key, new, fresh, loop.time() + timeout_s, answer))
        if self._runner is None or self._runner.done():
            self._runner = loop.create_task(self._run(), name=f"session {self._target}")
            self._runner.add_done_callback(self._ended)
        if self._sweeping is None:
            self._sweeping = loop.call_later(_SWEEP_S, self._sweep)
        self._wake.set()
        return answer

    # ------------------------------------------------------------------------------- running

    async def _run(self) -> None:
        """Keep a session open while there is something to ask, with backoff between attempts."""
        backoff = Backoff(clamp_s=RECONNECT_CLAMP_S)
        while self._unsent or self._sent:
            try:
                stream = self._connect()
            except ConsensusError as error:
                self._abandon(error, all_of_it=True)
                return
            try:
                await self._converse(stream, backoff)
                broken: ConsensusError = Indeterminate(
                    ErrorKind.UNAVAILABLE, "the committer ended the session"
                )
            except aio.AioRpcError as error:
                broken = wire.status_error(error)
            except ConsensusError as error:
                broken = error
            finally:
                stream.cancel()
                self._window = 0
            if broken.kind.final or self._closed:
                self._abandon(broken, all_of_it=True)
                return
            self._abandon(broken, all_of_it=False)
            log.log(
                backoff.level,
                "session broken",
                extra=fields(url=self._target, error=broken.message, attempt=backoff.attempts),
            )
            await backoff.wait()

    async def _converse(self, stream: Stream, backoff: Backoff) -> None:
        await stream.write(pb.SessionRequest(expect_incarnation=self._pinned()))
        opening = await stream.read()
        if opening is aio.EOF or not isinstance(opening, pb.SessionResponse):
            await _raise_status(stream)
            return
        if opening.HasField("err"):
            raise wire.from_error(opening.err)
        self._pin(opening.incarnation)
        backoff.reset()
        self._window = max(1, opening.window)
        self._wake.set()
        writer = asyncio.get_running_loop().create_task(self._write(stream), name="session writer")
        try:
            while isinstance(answers := await stream.read(), pb.SessionResponse):
                if answers.HasField("err"):
                    raise wire.from_error(answers.err)
                self._resolve(answers)
            await _raise_status(stream)
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, stream: Stream) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._unsent and len(self._sent) < self._window:
                if message := self._gather():
                    await stream.write(message)

    def _gather(self) -> pb.SessionRequest | None:
        """Put everything that may go now into one message; from here on it counts as sent."""
        cas: list[_Asked] = []
        heads: list[_Asked] = []
        room = self._window - len(self._sent)
        size = 0
        while self._unsent and len(cas) + len(heads) < room and size < wire.PART_BYTES:
            asked = self._unsent.popleft()
            if asked.answer.done():  # cancelled, or past its deadline
                continue
            size += len(asked.key)
            if asked.new is None:
                heads.append(asked)
            else:
                cas.append(asked)
                size += len(asked.new.data)
        if not cas and not heads:
            return None
        first = self._next_number
        self._next_number += len(cas) + len(heads)
        self._sent.update(enumerate([*cas, *heads], first))
        return pb.SessionRequest(
            first=first,
            cas_key=[a.key for a in cas],
            cas_seqno=[a.new.seqno for a in cas if a.new],
            cas_data=[a.new.data for a in cas if a.new],
            head_key=[a.key for a in heads],
            head_fresh=[a.fresh for a in heads],
        )

    def _resolve(self, answers: pb.SessionResponse) -> None:
        for number in answers.committed:
            self._answer(number, CasResult.COMMITTED)
        for number in answers.mismatched:
            self._answer(number, CasResult.EXPECTATION_MISMATCH)
        for number in answers.absent:
            self._answer(number, None)
        for number, head in zip(answers.found, answers.heads, strict=True):
            self._answer(number, wire.from_versioned(head))
        for number, message in zip(answers.failed, answers.errors, strict=True):
            if (asked := self._sent.pop(number, None)) and not asked.answer.done():
                asked.answer.set_exception(wire.from_error(message))
        if self._unsent:
            self._wake.set()

    def _answer(self, number: int, value: CasResult | VersionedData | None) -> None:
        asked = self._sent.pop(number, None)
        if asked is not None and not asked.answer.done():
            asked.answer.set_result(value)

    # -------------------------------------------------------------------------------- losses

    def _abandon(self, error: ConsensusError, *, all_of_it: bool) -> None:
        """Answer the callers of a broken stream; `all_of_it` if there will be no other stream."""
        sent, self._sent = self._sent, {}
        again: list[_Asked] = []
        for asked in sent.values():
            if asked.answer.done():
                continue
            if asked.new is None and not all_of_it:
                again.append(asked)
            else:
                asked.answer.set_exception(_classified(error, sent=asked.new is not None))
        self._unsent.extendleft(reversed(again))
        if all_of_it:
            while self._unsent:
                asked = self._unsent.popleft()
                if not asked.answer.done():
                    asked.answer.set_exception(_classified(error, sent=False))

    def _sweep(self) -> None:
        """Give up on operations past their deadline."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for asked in self._sent.values():
            if asked.deadline <= now and not asked.answer.done():
                what = f"{self._target} did not answer in time"
                asked.answer.set_exception(Indeterminate(ErrorKind.TIMEOUT, what))
        for asked in self._unsent:
            if asked.deadline <= now and not asked.answer.done():
                what = f"{self._target} could not be reached in time; nothing was sent"
                asked.answer.set_exception(Determinate(ErrorKind.UNAVAILABLE, what))
        while self._unsent and self._unsent[0].answer.done():
            self._unsent.popleft()
        pending = self._unsent or self._sent
        self._sweeping = loop.call_later(_SWEEP_S, self._sweep) if pending else None

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._runner is task:
            self._runner = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("session failed unexpectedly", exc_info=error)
            broken = Indeterminate(ErrorKind.INTERNAL, f"{type(error).__name__}: {error}")
            self._abandon(broken, all_of_it=True)


def _classified(error: ConsensusError, *, sent: bool) -> ConsensusError:
    """Return the outcome of an operation whose session failed: unknown only if it was sent."""
    outcome = (Indeterminate if sent else Determinate)(
        error.kind, error.message, retry_after_ms=error.retry_after_ms
    )
    outcome.__cause__ = error
    return outcome


async def _raise_status(stream: Stream) -> None:
    """Raise the status a finished stream ended with, unless it is OK."""
    code = await stream.code()
    if code is not grpc.StatusCode.OK:
        raise aio.AioRpcError(
            code,
            await stream.initial_metadata(),
            await stream.trailing_metadata(),
            details=await stream.details(),
        )
