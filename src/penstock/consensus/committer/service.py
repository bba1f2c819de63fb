"""The committer over gRPC.

Handlers translate and nothing else: authentication, the store's incarnation, the committer's
method, the answer. Operation errors are data; only what was refused before it ran is a status, and
carries the trailer that proves it (`wire`). Small compare-and-sets and heads, which are nearly all
of the traffic, do not come as calls but in sessions (`sessions`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol

from google.protobuf.message import Message

from penstock.consensus.backend import PAGE_BYTES
from penstock.consensus.committer import wire
from penstock.consensus.committer.auth import ANYBODY, Access, Principal, TokenFile
from penstock.consensus.committer.committer import Caller, PersistCommitter
from penstock.consensus.committer.gate import Gate, Revoked, host_of
from penstock.consensus.committer.grpcio import aio, grpc
from penstock.consensus.committer.proto import consensus_pb2 as pb
from penstock.consensus.committer.sessions import Context, ServedSession, unexpected
from penstock.consensus.store import CasResult, ConsensusError, Determinate, ErrorKind
from penstock.servicekit.logs import fields

log = logging.getLogger("penstock.consensus.committer")

SERVER_OPTIONS = (
    *wire.COMMON_OPTIONS,
    # Clients ping every 10 s; gRPC would count that as abuse and hang up.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Two daemons on one port would otherwise share it, and each see half of the calls.
    ("grpc.so_reuseport", 0),
)

_PEERS_MAX = 10_000
_CLIENT_SHOWN_MAX = 80
_SLOW_SEND_S = 60.0


class Pinned(Protocol):
    """A request that may name the store its sender knows."""

    expect_incarnation: bytes


Serve = Callable[[Any, Caller, Principal], Awaitable[Message]]
ServeMany = Callable[[Any, Caller, Principal], AsyncGenerator[Message, None]]


class ConsensusService:
    """The handlers of one committer."""

    def __init__(self, committer: PersistCommitter, *, tokens: TokenFile | None = None) -> None:
        failures = committer.metrics.auth_failures
        self._committer = committer
        self._gate = Gate(tokens, count=lambda reason: failures.labels(reason).add())
        self._peers: OrderedDict[tuple[str, str, str], None] = OrderedDict()

    def handler(self) -> grpc.GenericRpcHandler:
        """The methods of the protocol, for `aio.Server.add_generic_rpc_handlers`."""

        def unary(
            serve: Serve, request: type[Message], response: type[Message]
        ) -> grpc.RpcMethodHandler[Any, Any]:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(serve, response),
                request_deserializer=request.FromString,
                response_serializer=response.SerializeToString,
            )

        def stream(
            serve: ServeMany, request: type[Message], response: type[Message]
        ) -> grpc.RpcMethodHandler[Any, Any]:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(serve, response),
                request_deserializer=request.FromString,
                response_serializer=response.SerializeToString,
            )

        methods = {
            "Head": unary(self._head, pb.HeadRequest, pb.HeadResponse),
            "Cas": unary(self._cas, pb.CasRequest, pb.CasResponse),
            "CasMany": unary(self._cas_many, pb.CasBatchRequest, pb.CasManyResponse),
            "CasAll": unary(self._cas_all, pb.CasBatchRequest, pb.CasResponse),
            "Scan": unary(self._scan, pb.ScanRequest, pb.ScanResponse),
            "Snapshot": unary(self._snapshot, pb.SnapshotRequest, pb.SnapshotResponse),
            "Truncate": unary(self._truncate, pb.TruncateRequest, pb.TruncateResponse),
            "ListKeys": unary(self._list_keys, pb.ListKeysRequest, pb.ListKeysResponse),
            "Subscribe": stream(self._subscribe, pb.SubscribeRequest, pb.SubscribeEvent),
            "Watch": stream(self._watch, pb.WatchRequest, pb.WatchEvent),
            "Session": grpc.stream_stream_rpc_method_handler(
                self._session,
                request_deserializer=pb.SessionRequest.FromString,
                response_serializer=pb.SessionResponse.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler(wire.SERVICE, methods)

    # ------------------------------------------------------------------------------- framing

    def _unary(
        self, serve: Serve, response: Callable[..., Message]
    ) -> Callable[[Pinned, Context], Awaitable[Message]]:
        async def handle(request: Pinned, context: Context) -> Message:
            pinned = request.expect_incarnation
            try:
                principal, caller = await self._admit_peer(context, pinned)
                try:
                    ok = await serve(request, caller, principal)
                except Determinate as error:
                    # The store was found missing and made again meanwhile. Who knew no store
                    # before loses nothing by meeting the new one.
                    if pinned or error.kind is not ErrorKind.STORE_RESET:
                        raise
                    caller = replace(caller, knows=self._incarnation())
                    ok = await serve(request, caller, principal)
            except ConsensusError as error:
                await self._refuse(error, context)
                return response(err=wire.to_error(error), incarnation=self._incarnation())
            except Exception as error:
                return response(
                    err=wire.to_error(unexpected(error)), incarnation=self._incarnation()
                )
            return response(ok=ok, incarnation=caller.knows)

        return handle

    def _stream(
        self, serve: ServeMany, response: Callable[..., Message]
    ) -> Callable[[Pinned, Context], Awaitable[None]]:
        async def handle(request: Pinned, context: Context) -> None:
            try:
                principal, caller = await self._admit_peer(context, request.expect_incarnation)
                async with (
                    self._gate.visit(principal),
                    contextlib.aclosing(serve(request, caller, principal)) as events,
                ):
                    async for event in events:
                        async with asyncio.timeout(_SLOW_SEND_S):
                            await context.write(event)
            except TimeoutError:
                # Alive, since it answers pings, and not reading. Its place is free already; the
                # status waits behind the one message that is on its way, and lets it come back.
                log.info("slow subscriber closed", extra=fields(peer=context.peer()))
                await context.abort(grpc.StatusCode.ABORTED, "the reader is too slow")
            except ConsensusError as error:
                if error.kind is ErrorKind.UNAVAILABLE:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
                await self._refuse(error, context)
                await context.write(response(err=wire.to_error(error)))
            except Exception as error:
                await context.write(response(err=wire.to_error(unexpected(error))))

        return handle

    async def _admit_peer(self, context: Context, pinned: bytes) -> tuple[Principal, Caller]:
        """Who asks. Who knows no store yet is bound to the present one, and told which it is."""
        principal = await self._gate.admit(context)
        metadata = context.invocation_metadata() or ()
        client = next((str(v) for k, v in metadata if k == wire.CLIENT_METADATA), "unnamed")
        peer = context.peer()
        self._log_peer(host_of(peer), principal, client[:_CLIENT_SHOWN_MAX])
        share = share_of(principal, peer, client)
        return principal, Caller(share, "grpc", pinned or self._incarnation(), principal.name)

    def _log_peer(self, host: str, principal: Principal, client: str) -> None:
        """By host and client, not by socket: every reconnect has a new port (B12)."""
        peer = (host, principal.name, client)
        if peer not in self._peers:
            who = "" if principal is ANYBODY else f" principal={principal.name}"
            log.info(f"Received connection from: {host}{who} client={client}")  # noqa: G004
            if len(self._peers) >= _PEERS_MAX:
                self._peers.popitem(last=False)
        self._peers[peer] = None
        self._peers.move_to_end(peer)

    async def _refuse(self, error: ConsensusError, context: Context) -> None:
        """End the call with a status if nothing of it has run, with the proof of that."""
        if not isinstance(error, Determinate) or error.kind not in wire.STATUS:
            return
        if isinstance(error, Revoked):  # after much that did run; the client may come again
            await context.abort(wire.STATUS[error.kind], error.message)
        trailers = [(wire.DETERMINACY_TRAILER, wire.DETERMINATE)]
        if error.retry_after_ms is not None:
            trailers.append((wire.RETRY_TRAILER, str(error.retry_after_ms)))
        await context.abort(wire.STATUS[error.kind], error.message, tuple(trailers))

    def _incarnation(self) -> bytes:
        return self._committer.incarnation

    # ---------------------------------------------------------------------------- operations

    async def _head(self, request: pb.HeadRequest, caller: Caller, who: Principal) -> pb.HeadOk:
        who.check(Access.READ, request.key)
        found = await self._committer.head(request.key, fresh=request.fresh, caller=caller)
        return pb.HeadOk(current=None if found is None else wire.to_versioned(found))

    async def _cas(self, request: pb.CasRequest, caller: Caller, who: Principal) -> pb.CasOk:
        key, new = wire.from_item(request)
        who.check(Access.WRITE, key)
        result = await self._committer.compare_and_set(key, new, caller=caller)
        return pb.CasOk(committed=result is CasResult.COMMITTED)

    async def _cas_many(
        self, request: pb.CasBatchRequest, caller: Caller, who: Principal
    ) -> pb.CasManyOk:
        batch = wire.from_items(request.items)
        for key, _ in batch:
            who.check(Access.WRITE, key)
        outcomes = await self._committer.compare_and_set_many(batch, caller=caller)
        return pb.CasManyOk(outcomes=[wire.to_outcome(o) for o in outcomes])

    async def _cas_all(
        self, request: pb.CasBatchRequest, caller: Caller, who: Principal
    ) -> pb.CasOk:
        batch = wire.from_items(request.items)
        for key, _ in batch:
            who.check(Access.WRITE, key)
        result = await self._committer.compare_and_set_all(batch, caller=caller)
        return pb.CasOk(committed=result is CasResult.COMMITTED)

    async def _scan(self, request: pb.ScanRequest, caller: Caller, who: Principal) -> pb.ScanOk:
        who.check(Access.READ, request.key)
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
        who.check(Access.READ, request.prefix)
        behind = wire.from_behind(request)
        page = await self._committer.snapshot_page(request.prefix, behind, caller=caller)
        return pb.SnapshotOk(
            entries=wire.to_items(page.entries), revision=page.revision, more=page.more
        )

    async def _truncate(
        self, request: pb.TruncateRequest, caller: Caller, who: Principal
    ) -> pb.TruncateOk:
        who.check(Access.WRITE, request.key)
        return pb.TruncateOk(
            deleted=await self._committer.truncate(request.key, request.seqno, caller=caller)
        )

    async def _list_keys(
        self, request: pb.ListKeysRequest, caller: Caller, who: Principal
    ) -> pb.ListKeysOk:
        who.check(Access.ADMIN, request.prefix)
        keys, more = await self._committer.list_page(request.prefix, request.after, caller=caller)
        return pb.ListKeysOk(keys=keys, more=more)

    async def _subscribe(
        self, request: pb.SubscribeRequest, caller: Caller, who: Principal
    ) -> AsyncGenerator[pb.SubscribeEvent, None]:
        who.check(Access.READ, request.key)
        events = self._committer.subscribe(request.key, getattr(request, "from"), caller=caller)
        async with contextlib.aclosing(events):
            async for event in events:
                yield wire.to_subscribe_event(event, caller.knows)

    async def _watch(
        self, request: pb.WatchRequest, caller: Caller, who: Principal
    ) -> AsyncGenerator[pb.WatchEvent, None]:
        who.check(Access.READ, request.prefix)
        events = self._committer.watch(request.prefix, request.from_revision, caller=caller)
        async with contextlib.aclosing(events):
            async for event in events:
                yield wire.to_watch_event(event, caller.knows)

    # ------------------------------------------------------------------------------ sessions

    async def _session(self, _: object, context: Context) -> None:
        opening = await context.read()
        if opening is aio.EOF:
            return
        try:
            principal, caller = await self._admit_peer(context, opening.expect_incarnation)
            self._committer.serving(caller)
            async with self._gate.visit(principal):
                await ServedSession(self._committer, context, principal, caller).run()
        except ConsensusError as error:
            await self._refuse(error, context)
            await context.write(pb.SessionResponse(err=wire.to_error(error)))


def share_of(principal: Principal, peer: str, client: str) -> str:
    """Whose share of the committer a call takes.

    That of the principal, however many connections it has and whatever it calls itself. Without
    tokens everybody is the same one, and each connection has its own; on a Unix socket connections
    cannot be told apart, and who may use it is one user, so there each has the one it names.
    """
    if principal is not ANYBODY:
        return principal.name
    return peer if peer.rpartition(":")[2] else f"{peer}{client}"
