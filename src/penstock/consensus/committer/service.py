"""The committer over gRPC.

Handlers only translate: authentication, the store's incarnation, the committer's method, the
answer. Errors of operations are data; only a call that was refused before it ran ends with a
status, and carries the trailer that proves it (`wire`). Small compare-and-sets and heads, nearly
all of the traffic, come in sessions and not as calls (`sessions`).

**Nothing of a request is read before its sender is admitted.** Every method is a stream to gRPC,
even with one request and one answer: gRPC would read the request of a unary method, however large,
before it calls us. A stream begins with its metadata, which identify the caller, and as long as we
do not read, HTTP/2 holds the rest back in the client. Then one message at a time is read, of at
most `Limits.message_bytes_max`, and an answer counts until it is taken (`unread`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from google.protobuf.message import Message

from penstock.consensus.backend import PAGE_BYTES
from penstock.consensus.committer import wire
from penstock.consensus.committer.access import check_access, check_write
from penstock.consensus.committer.committer import Caller, PersistCommitter
from penstock.consensus.committer.proto import consensus_pb2 as pb
from penstock.consensus.committer.sessions import ServedSession, unexpected
from penstock.consensus.store import (
    ATOMIC_BYTES_MAX,
    Batch,
    CasResult,
    ConsensusError,
    Determinate,
    ErrorKind,
)
from penstock.servicekit.logs import fields
from penstock.servicekit.rpc.gate import Gate, Revoked, Unauthenticated, host_of
from penstock.servicekit.rpc.grpcio import Context, grpc
from penstock.servicekit.rpc.tokens import ANYBODY, Access, Principal, TokenFile
from penstock.servicekit.rpc.unread import Outlet, ReaderGone, SlowReader

log = logging.getLogger("penstock.consensus.committer")

_PEERS_MAX = 10_000
_CLIENT_NAME_MAX = 128
_ROOM_S = 10.0
"""How long a call may wait until its client has read earlier answers."""


M = TypeVar("M", bound=Message)
Serve = Callable[[Any, Caller, Principal], Awaitable[Message]]
ServeMany = Callable[[Any, Caller, Principal], AsyncGenerator[Message, None]]
Handle = Callable[[Context, Principal, str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Received:
    """A batch, assembled from its parts."""

    batch: Batch
    expect_incarnation: bytes


class ConsensusService:
    """The handlers of one committer."""

    def __init__(self, committer: PersistCommitter, *, tokens: TokenFile | None = None) -> None:
        failures = committer.metrics.auth_failures
        self._committer = committer
        self._limits = committer.options.limits
        self._gate = Gate(tokens, count=lambda reason: failures.labels(reason).add())
        self._peers: OrderedDict[tuple[str, str, str], None] = OrderedDict()

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the methods of the protocol, for `aio.Server.add_generic_rpc_handlers`."""
        handles: dict[str, Handle] = {
            "Head": self._read(self._head, pb.HeadRequest, pb.HeadResponse),
            "Cas": self._write(self._cas, pb.CasRequest, pb.CasResponse),
            "CasMany": self._batch(self._cas_many, pb.CasManyResponse),
            "CasAll": self._batch(self._cas_all, pb.CasResponse),
            "Scan": self._read(self._scan, pb.ScanRequest, pb.ScanResponse),
            "Snapshot": self._read(self._snapshot, pb.SnapshotRequest, pb.SnapshotResponse),
            "Truncate": self._write(self._truncate, pb.TruncateRequest, pb.TruncateResponse),
            "ListKeys": self._read(self._list_keys, pb.ListKeysRequest, pb.ListKeysResponse),
            "Subscribe": self._stream(self._subscribe, pb.SubscribeRequest, pb.SubscribeEvent),
            "Watch": self._stream(self._watch, pb.WatchRequest, pb.WatchEvent),
            "Session": self._session,
        }
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.stream_stream_rpc_method_handler(self._admitting(handle))
            for name, handle in handles.items()
        }
        return grpc.method_handlers_generic_handler(wire.SERVICE, methods)

    # ------------------------------------------------------------------------------- framing

    def _admitting(self, handle: Handle) -> Callable[[object, Context], Awaitable[None]]:
        """Wrap a method for gRPC, which calls it before anything of the request is read."""

        async def admitting(_: object, context: Context) -> None:
            try:
                principal, share = await self._admit_peer(context)
                await handle(context, principal, share)
            except SlowReader:
                # Its place is free already; the status waits behind the one message that is on its
                # way, and allows the client to come back.
                log.info("slow reader closed", extra=fields(peer=context.peer()))
                await context.abort(grpc.StatusCode.ABORTED, "the reader is too slow")
            except Unauthenticated as error:
                refused = Determinate(ErrorKind.UNAUTHENTICATED, str(error))
                await self._abort(refused, context)
            except Revoked as error:
                # Without the trailer: much of the call may have run.
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
            except ConsensusError as error:
                await self._abort(error, context)
            except ReaderGone as gone:
                # To gRPC the call is then cancelled by its client; a status could not be sent.
                raise asyncio.CancelledError from gone

        return admitting

    def _write(self, serve: Serve, request: type[M], response: Callable[..., Message]) -> Handle:
        """Handle one request with one small answer."""

        async def handle(context: Context, principal: Principal, share: str) -> None:
            outlet = self._outlet(context, share)
            with self._committer.admission.call():
                answer = await self._answer(
                    serve, lambda: self._receive(context, request), response, principal, share
                )
                await outlet.write(answer.SerializeToString())

        return handle

    def _read(self, serve: Serve, request: type[M], response: Callable[..., Message]) -> Handle:
        """Handle one request whose answer may be large: there must be room for it first."""
        unread = self._committer.unread

        async def handle(context: Context, principal: Principal, share: str) -> None:
            outlet = self._outlet(context, share)
            with self._committer.admission.call():
                await unread.room(share, _ROOM_S)
                with unread.held(share, PAGE_BYTES):
                    answer = await self._answer(
                        serve, lambda: self._receive(context, request), response, principal, share
                    )
                    message = answer.SerializeToString()
                del answer  # the client may take its time: keep one copy only
                await outlet.write(message)

        return handle

    def _batch(self, serve: Serve, response: Callable[..., Message]) -> Handle:
        """Handle a batch, in one message or several, with one small answer."""
        limits = self._limits
        bytes_max = max(self._committer.options.entry_bytes_max, ATOMIC_BYTES_MAX)

        async def handle(context: Context, principal: Principal, share: str) -> None:
            outlet = self._outlet(context, share)

            async def receive() -> _Received:
                assembly = wire.Assembly(
                    elements_max=limits.batch_elements_max, bytes_max=bytes_max
                )
                first = part = await self._receive(context, pb.CasBatchRequest)
                assembly.add(part)
                if part.more:
                    with self._committer.admission.arriving(part.bytes):
                        await context.send_initial_metadata(wire.ADMITTED)
                        while part.more:
                            part = await self._receive(context, pb.CasBatchRequest)
                            assembly.add(part)
                return _Received(assembly.batch(), first.expect_incarnation)

            with self._committer.admission.call():
                answer = await self._answer(serve, receive, response, principal, share)
                await outlet.write(answer.SerializeToString())

        return handle

    async def _answer(
        self,
        serve: Serve,
        receive: Callable[[], Awaitable[Any]],
        response: Callable[..., Message],
        principal: Principal,
        share: str,
    ) -> Message:
        """Return the answer to a request, errors included; raise those that become a status."""
        try:
            request = await receive()
            pinned = request.expect_incarnation
            caller = self._caller(principal, share, pinned)
            try:
                ok = await serve(request, caller, principal)
            except Determinate as error:
                # The store was found missing and created again meanwhile. A caller that knew
                # no store before loses nothing by using the new one.
                if pinned or error.kind is not ErrorKind.STORE_RESET:
                    raise
                caller = replace(caller, knows=self._incarnation())
                ok = await serve(request, caller, principal)
        except ConsensusError as error:
            if _is_status(error):
                raise
            return response(err=wire.to_error(error), incarnation=self._incarnation())
        except Exception as error:
            return response(err=wire.to_error(unexpected(error)), incarnation=self._incarnation())
        return response(ok=ok, incarnation=caller.knows)

    def _stream(
        self, serve: ServeMany, request: type[M], response: Callable[..., Message]
    ) -> Handle:
        """Handle one request with any number of events."""

        async def handle(context: Context, principal: Principal, share: str) -> None:
            outlet = self._outlet(context, share)
            try:
                with self._committer.admission.call():
                    asked: Any = await self._receive(context, request)
                caller = self._caller(principal, share, asked.expect_incarnation)
                async with (
                    self._gate.visit(principal),
                    contextlib.aclosing(serve(asked, caller, principal)) as events,
                ):
                    async for event in events:
                        await outlet.write(event.SerializeToString())
            except ConsensusError as error:
                if error.kind is ErrorKind.UNAVAILABLE or _is_status(error):
                    raise
                await outlet.write(response(err=wire.to_error(error)).SerializeToString())
            except (ReaderGone, SlowReader, Revoked):
                raise
            except Exception as error:
                failed = response(err=wire.to_error(unexpected(error)))
                await outlet.write(failed.SerializeToString())

        return handle

    async def _receive(self, context: Context, message: type[M]) -> M:
        """Read and decode the next message of a request."""
        try:
            async with asyncio.timeout(self._limits.request_s):
                data = await context.read()
        except TimeoutError:
            what = f"the request did not arrive within {self._limits.request_s:g} s"
            raise Determinate(ErrorKind.TIMEOUT, what) from None
        if not isinstance(data, bytes):
            raise Determinate(ErrorKind.INVALID_ARGUMENT, "the request ends before its message")
        return wire.decoded(data, message)

    def _outlet(self, context: Context, share: str) -> Outlet:
        count = partial(self._committer.unread.add, share)
        return Outlet(context, self._limits.slow_s, count)

    def _caller(self, principal: Principal, share: str, pinned: bytes) -> Caller:
        """Return the caller, bound to the current store if it knows none yet."""
        return Caller(share, "grpc", pinned or self._incarnation(), principal.name)

    async def _admit_peer(self, context: Context) -> tuple[Principal, str]:
        """Return the caller, by its metadata alone, and the share of the committer it uses."""
        principal = await self._gate.admit(context)
        metadata = context.invocation_metadata() or ()
        client = next((str(v) for k, v in metadata if k == wire.CLIENT_METADATA), "unnamed")
        client = client[:_CLIENT_NAME_MAX]
        peer = context.peer()
        self._log_peer(host_of(peer), principal, client)
        return principal, share_of(principal, peer, client)

    def _log_peer(self, host: str, principal: Principal, client: str) -> None:
        """Log a new peer, by host and client and not by socket: every reconnect has a new port."""
        peer = (host, principal.name, client)
        if peer not in self._peers:
            who = "" if principal is ANYBODY else f" principal={principal.name}"
            log.info(f"Received connection from: {host}{who} client={client}")  # noqa: G004
            if len(self._peers) >= _PEERS_MAX:
                self._peers.popitem(last=False)
        self._peers[peer] = None
        self._peers.move_to_end(peer)

    async def _abort(self, error: ConsensusError, context: Context) -> None:
        """End a call with a status, which proves that nothing of it has run if `_is_status`."""
        trailers = []
        if _is_status(error):
            trailers.append((wire.DETERMINACY_TRAILER, wire.DETERMINATE))
        if error.retry_after_ms is not None:
            trailers.append((wire.RETRY_TRAILER, str(error.retry_after_ms)))
        status = wire.STATUS.get(error.kind, grpc.StatusCode.UNAVAILABLE)
        await context.abort(status, error.message, tuple(trailers))

    def _incarnation(self) -> bytes:
        return self._committer.incarnation

    # ---------------------------------------------------------------------------- operations

    async def _head(self, request: pb.HeadRequest, caller: Caller, who: Principal) -> pb.HeadOk:
        check_access(who, Access.READ, request.key)
        found = await self._committer.head(request.key, fresh=request.fresh, caller=caller)
        return pb.HeadOk(current=None if found is None else wire.to_versioned(found))

    async def _cas(self, request: pb.CasRequest, caller: Caller, who: Principal) -> pb.CasOk:
        key, new = wire.from_item(request)
        check_write(who, key)
        result = await self._committer.compare_and_set(key, new, caller=caller)
        return pb.CasOk(committed=result is CasResult.COMMITTED)

    async def _cas_many(self, request: _Received, caller: Caller, who: Principal) -> pb.CasManyOk:
        for key, _ in request.batch:
            check_write(who, key)
        outcomes = await self._committer.compare_and_set_many(request.batch, caller=caller)
        return pb.CasManyOk(outcomes=[wire.to_outcome(o) for o in outcomes])

    async def _cas_all(self, request: _Received, caller: Caller, who: Principal) -> pb.CasOk:
        for key, _ in request.batch:
            check_write(who, key)
        result = await self._committer.compare_and_set_all(request.batch, caller=caller)
        return pb.CasOk(committed=result is CasResult.COMMITTED)

    async def _scan(self, request: pb.ScanRequest, caller: Caller, who: Principal) -> pb.ScanOk:
        check_access(who, Access.READ, request.key)
        page = await self._committer.scan(
            request.key,
            getattr(request, "from"),
            request.limit,
            bytes_max=PAGE_BYTES,
            caller=caller,
        )
        return pb.ScanOk(entries=[wire.to_versioned(e) for e in page.entries], more=page.more)

    async def _snapshot(
        self, request: pb.SnapshotRequest, caller: Caller, who: Principal
    ) -> pb.SnapshotOk:
        check_access(who, Access.READ, request.prefix)
        behind = wire.from_behind(request)
        page = await self._committer.snapshot_page(request.prefix, behind, caller=caller)
        return pb.SnapshotOk(
            entries=wire.to_items(page.entries), revision=page.revision, more=page.more
        )

    async def _truncate(
        self, request: pb.TruncateRequest, caller: Caller, who: Principal
    ) -> pb.TruncateOk:
        check_write(who, request.key)
        return pb.TruncateOk(
            deleted=await self._committer.truncate(request.key, request.seqno, caller=caller)
        )

    async def _list_keys(
        self, request: pb.ListKeysRequest, caller: Caller, who: Principal
    ) -> pb.ListKeysOk:
        check_access(who, Access.LIST, request.prefix)
        keys, more = await self._committer.list_page(request.prefix, request.after, caller=caller)
        return pb.ListKeysOk(keys=keys, more=more)

    async def _subscribe(
        self, request: pb.SubscribeRequest, caller: Caller, who: Principal
    ) -> AsyncGenerator[pb.SubscribeEvent, None]:
        check_access(who, Access.READ, request.key)
        events = self._committer.subscribe(request.key, getattr(request, "from"), caller=caller)
        async with contextlib.aclosing(events):
            async for event in events:
                yield wire.to_subscribe_event(event, caller.knows)

    async def _watch(
        self, request: pb.WatchRequest, caller: Caller, who: Principal
    ) -> AsyncGenerator[pb.WatchEvent, None]:
        check_access(who, Access.READ, request.prefix)
        events = self._committer.watch(request.prefix, request.from_revision, caller=caller)
        async with contextlib.aclosing(events):
            async for event in events:
                yield wire.to_watch_event(event, caller.knows)

    # ------------------------------------------------------------------------------ sessions

    async def _session(self, context: Context, principal: Principal, share: str) -> None:
        outlet = self._outlet(context, share)
        try:
            with self._committer.admission.session():
                opening = await self._receive(context, pb.SessionRequest)
                if opening.cas_key or opening.head_key:
                    what = "the message that opens a session has no operations"
                    raise Determinate(ErrorKind.INVALID_ARGUMENT, what)
                caller = self._caller(principal, share, opening.expect_incarnation)
                self._committer.serving(caller)
                async with self._gate.visit(principal):
                    await ServedSession(self._committer, context, outlet, principal, caller).run()
        except ConsensusError as error:
            if _is_status(error):
                raise
            await outlet.write(pb.SessionResponse(err=wire.to_error(error)).SerializeToString())


def share_of(principal: Principal, peer: str, client: str) -> str:
    """Return the name of the share of the committer that a call uses.

    That is the principal's, however many connections it has and whatever client name it gives.
    Without tokens all callers are one principal, and each connection has its own share. On a Unix
    socket, connections cannot be distinguished and all belong to one user, so the client name
    counts.
    """
    if principal is not ANYBODY:
        return principal.name
    return peer if peer.rpartition(":")[2] else f"{peer}{client}"


def _is_status(error: ConsensusError) -> bool:
    """True if an error ends its call as a status, with the proof that nothing of it has run."""
    return isinstance(error, Determinate) and error.kind in wire.STATUS
