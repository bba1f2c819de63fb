"""`Consensus` over gRPC: `RpcConsensus`, for every process that does not host the committer.

Small compare-and-sets and heads share one session (`pipe`); batches and large entries go as calls
of their own, in parts if one message does not hold them. `wire.status_error` says what a failed
call proves. What is sent again:

- reads and `truncate`, within their deadline, with backoff;
- never a compare-and-set. It is not sent at all before the channel is up, so that a committer that
  cannot be reached is `Determinate` rather than one more unknown outcome;
- streams, which reconnect from what they delivered last, for as long as it takes.

The first incarnation seen is pinned and sent with everything. If the store is created anew, the
application gets STORE_RESET and must stop: what it knows is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from penstock.consensus.backend import LivePage
from penstock.consensus.committer import wire
from penstock.consensus.committer.inprocess import InProcessConsensus
from penstock.consensus.committer.pipe import Pipe
from penstock.consensus.committer.proto import consensus_pb2 as pb
from penstock.consensus.snapshot import Behind, read_snapshot
from penstock.consensus.store import (
    LIVENESS_KEY,
    SCAN_ALL,
    Batch,
    CasResult,
    ConsensusError,
    Determinate,
    Entries,
    Entry,
    ErrorKind,
    Indeterminate,
    Resync,
    SnapshotEvent,
    SubscribeEvent,
    VersionedData,
    WatchEvent,
    check_all,
    check_entry,
    check_key,
    check_limit,
    check_many,
    check_prefix,
    check_revision,
    check_seqno,
)
from penstock.errors import UsageError, UserError
from penstock.servicekit.logs import fields
from penstock.servicekit.rpc.address import ServiceAddress, is_own_listener
from penstock.servicekit.rpc.backoff import RECONNECT_CLAMP_S, Backoff
from penstock.servicekit.rpc.channel import authorization, open_channel
from penstock.servicekit.rpc.grpcio import aio, grpc
from penstock.servicekit.rpc.sockets import check_owned_socket
from penstock.servicekit.secrets import mask_url

__all__ = ["InProcessConsensus", "RpcConsensus", "RpcOptions"]

log = logging.getLogger("penstock.consensus.committer")

_CHANNEL_OPTIONS = {
    "grpc.enable_retries": 0,
    # Reads are resent here; gRPC would wait up to two minutes for a committer that is back already.
    "grpc.initial_reconnect_backoff_ms": 50,
    "grpc.min_reconnect_backoff_ms": 50,
    "grpc.max_reconnect_backoff_ms": 2_000,
}

_SESSION_ENTRY_BYTES_MAX = 256 << 10
"""Larger entries go alone: in a session, all other answers would wait behind them."""

_SCAN_RESTARTS_MAX = 5

R = TypeVar(
    "R",
    pb.CasResponse,
    pb.CasManyResponse,
    pb.ScanResponse,
    pb.SnapshotResponse,
    pb.TruncateResponse,
    pb.ListKeysResponse,
)
E = TypeVar("E", pb.SubscribeEvent, pb.WatchEvent)
Pinned = (
    pb.CasBatchRequest
    | pb.ScanRequest
    | pb.SnapshotRequest
    | pb.TruncateRequest
    | pb.ListKeysRequest
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcOptions:
    """Deadlines, in seconds."""

    read_s: float = 10.0
    page_s: float = 30.0
    write_s: float = 30.0
    silence_s: float = 30.0
    """A stream silent for this long is dead; the server sends a heartbeat every 10 s."""


class RpcConsensus:
    """A committer in another process. Connects on first use, on the event loop of that use."""

    def __init__(
        self, url: str, options: RpcOptions | None = None, *, client_id: str | None = None
    ) -> None:
        self.url = mask_url(url)
        self._address = ServiceAddress.parse(url)
        authorization(self._address)  # so that a mistake is reported at once
        if self._address.socket is not None:
            check_owned_socket(self._address.socket)
        if is_own_listener(self._address):
            raise UsageError(
                "this process hosts that committer, and would deadlock calling itself",
                where=self.url,
                fix="use the committer in the process, InProcessConsensus",
            )
        self._options = options or RpcOptions()
        self._client_id = client_id or (
            f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        )
        self._channel: aio.Channel | None = None
        self._pipe: Pipe | None = None
        self._pinned = b""
        self._connected = False
        self._closed = False
        self.gaps = 0
        """Gaps seen in streams; each is a bug of the server, and was read again."""

    # --------------------------------------------------------------------------------- store

    async def incarnation(self) -> bytes:
        if not self._pinned:
            await self.head(LIVENESS_KEY)
        self._check_open()
        return self._pinned

    async def list_keys(self, prefix: str = "") -> AsyncIterator[str]:
        check_prefix(prefix)
        after, more = "", True
        while more:
            request = pb.ListKeysRequest(prefix=prefix, after=after)
            answer = await self._read(
                "ListKeys", request, pb.ListKeysResponse, self._options.page_s
            )
            more = answer.ok.more
            for after in answer.ok.keys:
                yield after

    async def head(self, key: str, *, fresh: bool = False) -> VersionedData | None:
        check_key(key)
        pipe = self._open_pipe()
        return await pipe.head(key, fresh=fresh, timeout_s=self._options.read_s)

    async def compare_and_set(self, key: str, new: VersionedData) -> CasResult:
        check_entry(key, new)
        if len(new.data) <= _SESSION_ENTRY_BYTES_MAX:
            return await self._open_pipe().compare_and_set(key, new, self._options.write_s)
        answer = await self._write_batch("CasMany", [(key, new)], pb.CasManyResponse)
        outcome = wire.from_outcome(answer.ok.outcomes[0])
        if isinstance(outcome, ConsensusError):
            raise outcome
        return outcome

    async def compare_and_set_many(self, batch: Batch) -> list[CasResult | ConsensusError]:
        check_many(batch)
        outcomes: list[CasResult | ConsensusError | None] = [_refusal(k, new) for k, new in batch]
        good = [element for element, o in zip(batch, outcomes, strict=True) if o is None]
        answered: list[CasResult | ConsensusError] = []
        for call in wire.to_calls(good):  # one after the other: a chain of one key may go on
            try:
                answer = await self._write_batch("CasMany", call, pb.CasManyResponse)
            except ConsensusError as error:
                answered += [error] * len(call)
            else:
                answered += [wire.from_outcome(o) for o in answer.ok.outcomes]
        settled = iter(answered)
        return [next(settled) if o is None else o for o in outcomes]

    async def compare_and_set_all(self, batch: Batch) -> CasResult:
        check_all(batch)
        answer = await self._write_batch("CasAll", batch, pb.CasResponse)
        return wire.from_cas_ok(answer.ok)

    async def scan(self, key: str, from_: int, limit: int = SCAN_ALL) -> list[VersionedData]:
        """Read page by page; truncation between two pages starts over, so there is no hole."""
        check_key(key)
        check_seqno(from_)
        check_limit(limit)
        for _ in range(_SCAN_RESTARTS_MAX):
            entries: list[VersionedData] = []
            async for page in self._pages(key, from_, limit):
                if entries and page[0].seqno != entries[-1].seqno + 1:
                    break
                entries += page
            else:
                return entries
        what = f"{key!r} was truncated faster than it could be read"
        raise Indeterminate(ErrorKind.CONFLICT, what)

    def snapshot(self, prefix: str) -> AsyncIterator[SnapshotEvent]:
        async def read(behind: Behind) -> LivePage:
            check_prefix(prefix)
            request = wire.to_snapshot_request(prefix, behind)
            answer = await self._read(
                "Snapshot", request, pb.SnapshotResponse, self._options.page_s
            )
            return wire.from_snapshot_ok(answer.ok)

        return read_snapshot(read)

    async def truncate(self, key: str, seqno: int) -> int | None:
        check_key(key)
        check_seqno(seqno)
        request = pb.TruncateRequest(key=key, seqno=seqno)
        answer = await self._read("Truncate", request, pb.TruncateResponse, self._options.write_s)
        return answer.ok.deleted if answer.ok.HasField("deleted") else None

    async def subscribe(self, key: str, from_: int) -> AsyncGenerator[SubscribeEvent, None]:
        check_key(key)
        check_seqno(from_)
        next_ = from_
        backoff = Backoff(clamp_s=RECONNECT_CLAMP_S)
        while True:
            request = pb.SubscribeRequest(key=key, expect_incarnation=self._pinned)
            setattr(request, "from", next_)
            try:
                messages = self._messages("Subscribe", request, pb.SubscribeEvent)
                async with contextlib.aclosing(messages):
                    async for message in messages:
                        backoff.reset()
                        event = wire.from_subscribe_event(message)
                        if isinstance(event, Entry):
                            if event.data.seqno < next_:
                                continue
                            if event.data.seqno > next_:
                                self.gaps += 1
                                log.error("gap in a stream", extra=fields(shard=key, due=next_))
                                break
                            next_ += 1
                        yield event
                        if isinstance(event, Resync):
                            return
            except ConsensusError as error:
                self._outage("subscription", error, backoff)
            await backoff.wait()

    async def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[WatchEvent, None]:
        check_prefix(prefix)
        check_revision(from_revision)
        last = from_revision
        backoff = Backoff(clamp_s=RECONNECT_CLAMP_S)
        while True:
            request = pb.WatchRequest(
                prefix=prefix, from_revision=last, expect_incarnation=self._pinned
            )
            try:
                messages = self._messages("Watch", request, pb.WatchEvent)
                async with contextlib.aclosing(messages):
                    async for message in messages:
                        backoff.reset()
                        event = wire.from_watch_event(message)
                        if isinstance(event, Entries) and event.revision <= last:
                            continue
                        last = max(last, event.revision)
                        yield event
            except ConsensusError as error:
                self._outage("watch", error, backoff)
            await backoff.wait()

    async def close(self) -> None:
        self._closed = True
        if self._pipe is not None:
            await self._pipe.close()
        if self._channel is not None:
            await self._channel.close()

    # --------------------------------------------------------------------------------- calls

    async def _read(self, method: str, request: Pinned, response: type[R], timeout_s: float) -> R:
        """Send a call that may be sent again, since it has no side effects or is idempotent."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        backoff = Backoff()
        reason: ConsensusError | None = None
        while True:
            try:
                left_s = max(0.001, deadline - loop.time())
                return await self._call(method, request, response, left_s)
            except ConsensusError as error:
                if error.kind is ErrorKind.TIMEOUT and reason is not None:
                    raise reason from error  # it says more than the deadline
                reason = error
                pause_s = backoff.next_s()
                hopeless = error.kind.final or error.kind is ErrorKind.UNDEFINED_TABLE
                if hopeless or self._closed or loop.time() + pause_s > deadline:
                    raise
                log.log(
                    backoff.level, "trying again", extra=fields(method=method, error=error.message)
                )
                await asyncio.sleep(pause_s)

    async def _write_batch(self, method: str, batch: Batch, response: type[R]) -> R:
        """Send a call once, and only when the channel is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.write_s
        channel = self._open_channel()
        try:
            async with asyncio.timeout_at(deadline):
                await channel.channel_ready()
        except TimeoutError as error:
            what = f"{self.url} could not be reached in time; nothing was sent"
            raise Determinate(ErrorKind.UNAVAILABLE, what) from error
        left_s = max(0.001, deadline - loop.time())
        parts = wire.to_parts(batch)
        first = next(parts)
        if not first.more:
            return await self._call(method, first, response, left_s)
        return await self._call_in_parts(method, first, parts, response, left_s)

    async def _call_in_parts(
        self,
        method: str,
        first: pb.CasBatchRequest,
        others: Iterator[pb.CasBatchRequest],
        response: type[R],
        timeout_s: float,
    ) -> R:
        """Send a call whose request is too large for one message."""
        first.expect_incarnation = self._pinned

        call: aio.StreamUnaryCall[Message, R]

        async def sent() -> AsyncIterator[pb.CasBatchRequest]:
            yield first
            if set(wire.ADMITTED) <= set(await call.initial_metadata() or ()):
                for part in others:
                    yield part

        call = self._open_channel().stream_unary(
            f"/{wire.SERVICE}/{method}",
            request_serializer=pb.CasBatchRequest.SerializeToString,
            response_deserializer=response.FromString,
        )(sent(), timeout=timeout_s, metadata=self._metadata())
        return await self._answered(call)

    async def _call(self, method: str, request: Pinned, response: type[R], timeout_s: float) -> R:
        request.expect_incarnation = self._pinned
        call = self._open_channel().unary_unary(
            f"/{wire.SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )
        return await self._answered(call(request, timeout=timeout_s, metadata=self._metadata()))

    async def _answered(self, call: Awaitable[R]) -> R:
        try:
            answer = await call
        except aio.AioRpcError as error:
            raise wire.status_error(error) from error
        except aio.UsageError as error:  # the channel was closed under the call
            raise Indeterminate(ErrorKind.UNAVAILABLE, "the client was closed") from error
        if answer.HasField("err"):
            raise wire.from_error(answer.err)
        self._pin(answer.incarnation)
        return answer

    async def _pages(
        self, key: str, from_: int, limit: int
    ) -> AsyncGenerator[list[VersionedData], None]:
        more = True
        while more and limit > 0:
            request = pb.ScanRequest(key=key, limit=limit)
            setattr(request, "from", from_)
            answer = await self._read("Scan", request, pb.ScanResponse, self._options.page_s)
            page = [wire.from_versioned(entry) for entry in answer.ok.entries]
            if not page:
                return
            yield page
            more = answer.ok.more
            from_ = page[-1].seqno + 1
            limit -= len(page)

    async def _messages(
        self, method: str, request: Message, response: type[E]
    ) -> AsyncGenerator[E, None]:
        """Yield the messages of one stream until it ends; silence ends it too."""
        call = self._open_channel().unary_stream(
            f"/{wire.SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )(request, metadata=self._metadata())
        try:
            while True:
                async with asyncio.timeout(self._options.silence_s):
                    message = await call.read()
                if not isinstance(message, response):  # the end of the stream
                    break
                if message.incarnation:
                    self._pin(message.incarnation)
                yield message
            if (code := await call.code()) is not grpc.StatusCode.OK:
                what = f"{code.name}: {await call.details()}"
                raise Indeterminate(ErrorKind.UNAVAILABLE, what)
        except aio.AioRpcError as error:
            raise wire.status_error(error) from error
        except TimeoutError as error:
            what = f"no sign of life for {self._options.silence_s:g} s"
            raise Indeterminate(ErrorKind.TIMEOUT, what) from error
        except (asyncio.CancelledError, aio.UsageError) as error:
            if not self._closed:
                raise
            raise Determinate(ErrorKind.UNAVAILABLE, "the client was closed") from error
        finally:
            call.cancel()

    def _outage(self, what: str, error: ConsensusError, backoff: Backoff) -> None:
        """Log that a stream broke; raise the error if waiting cannot help."""
        if self._closed or error.kind.final or error.kind is ErrorKind.UNDEFINED_TABLE:
            raise error
        log.log(
            backoff.level,
            "stream broken",
            extra=fields(stream=what, url=self.url, error=error.message, attempt=backoff.attempts),
        )

    # ---------------------------------------------------------------------------- connection

    def _open_pipe(self) -> Pipe:
        self._check_open()
        if self._pipe is None:
            self._pipe = Pipe(
                self._open_session, pinned=lambda: self._pinned, pin=self._pin, target=self.url
            )
        return self._pipe

    def _open_session(self) -> aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]:
        method: aio.StreamStreamMultiCallable[pb.SessionRequest, pb.SessionResponse] = (
            self._open_channel().stream_stream(
                f"/{wire.SERVICE}/Session",
                request_serializer=pb.SessionRequest.SerializeToString,
                response_deserializer=pb.SessionResponse.FromString,
            )
        )
        return method(metadata=self._metadata())

    def _open_channel(self) -> aio.Channel:
        """Return the channel, which is bound to the event loop of its first use."""
        self._check_open()
        if self._channel is None:
            log.info(f"Connecting to persistd: {self.url}")  # noqa: G004 - a line people grep for
            self._channel = open_channel(self._address, _CHANNEL_OPTIONS)
        return self._channel

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        try:
            token = authorization(self._address)
        except UserError as error:  # the file was valid when this client was made
            what = ": ".join(filter(None, (error.what, error.why)))
            raise Determinate(ErrorKind.UNAUTHENTICATED, what) from error
        return ((wire.CLIENT_METADATA, self._client_id), *token)

    def _check_open(self) -> None:
        if self._closed:
            raise Determinate(ErrorKind.UNAVAILABLE, "the store is closed")

    def _pin(self, incarnation: bytes) -> None:
        if not self._connected:
            self._connected = True
            log.info(f"Connected to persistd: {self.url}")  # noqa: G004
        if not self._pinned:
            self._pinned = incarnation
        elif incarnation != self._pinned:
            what = f"knew {self._pinned.hex()}, found {incarnation.hex()}: its contents are gone"
            raise Determinate(ErrorKind.STORE_RESET, what)


def _refusal(key: str, new: VersionedData) -> ConsensusError | None:
    try:
        check_entry(key, new)
    except Determinate as error:
        return error
    return None
