"""Over the network: the same answers, and the truth about those that are lost."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import psycopg
import pytest
from grpc import aio

from consensus.committer.scripted import (
    CACHED,
    COMMITTED,
    MISMATCH,
    ScriptedBackend,
    V,
    eventually,
    failing,
    take,
)
from consensus.committer.serving import Served, served
from penstock.consensus.committer import wire
from penstock.consensus.committer.client import InProcessConsensus, RpcConsensus, RpcOptions
from penstock.consensus.committer.options import CommitterOptions, Limits
from penstock.consensus.committer.proto import consensus_pb2 as pb
from penstock.consensus.memory import MemoryBackend
from penstock.consensus.open import open_backend
from penstock.consensus.store import (
    ENTRY_BYTES_MAX,
    CaughtUp,
    ConsensusError,
    Determinate,
    Entries,
    Entry,
    ErrorKind,
    Indeterminate,
    WatchProgress,
)
from penstock.errors import UsageError
from penstock.servicekit.rpc import listener
from penstock.servicekit.rpc.address import register_listener
from penstock.servicekit.rpc.listener import server_options
from penstock.servicekit.rpc.tokens import TokenFile
from penstock.testing.postgres import free_port


@asynccontextmanager
async def connected(
    backend: MemoryBackend | None = None,
    options: RpcOptions | None = None,
    *,
    committer: CommitterOptions = CACHED,
) -> AsyncIterator[tuple[Served, RpcConsensus]]:
    async with served(backend or MemoryBackend(), committer) as server:
        store = RpcConsensus(server.url, options)
        try:
            yield server, store
        finally:
            await store.close()


def raw(channel: aio.Channel, method: str, response: type) -> Callable[..., Awaitable[object]]:
    """A method as another client would call it, with bytes as given."""
    return channel.unary_unary(
        f"/{wire.SERVICE}/{method}", response_deserializer=response.FromString
    )


# ---------------------------------------------------------------------------------------- protocol


def test_cas_request_has_no_expected_field() -> None:
    """The expected head is implied, and a mismatch carries nothing."""
    assert set(pb.CasRequest.DESCRIPTOR.fields_by_name) == {"key", "new", "expect_incarnation"}
    assert set(pb.CasOk.DESCRIPTOR.fields_by_name) == {"committed"}


async def test_a_request_without_its_entry_is_refused_once_and_as_data() -> None:
    """As a status it would read as unknown, and be retried for ever."""
    async with served(MemoryBackend()) as server, aio.insecure_channel(server.url[7:]) as channel:
        answer = await raw(channel, "Cas", pb.CasResponse)(
            pb.CasRequest(key="k").SerializeToString()
        )
        assert isinstance(answer, pb.CasResponse)
        error = wire.from_error(answer.err)
        assert isinstance(error, Determinate)
        assert error.kind is ErrorKind.INVALID_ARGUMENT


async def test_unary_heads_and_appends_serve_clients_without_a_session() -> None:
    async with served(MemoryBackend()) as server, aio.insecure_channel(server.url[7:]) as channel:
        cas, head = raw(channel, "Cas", pb.CasResponse), raw(channel, "Head", pb.HeadResponse)
        request = pb.CasRequest(key="k", new=pb.Versioned(seqno=0, data=b"x"))
        first, second = [await cas(request.SerializeToString()) for _ in range(2)]
        assert isinstance(first, pb.CasResponse)
        assert isinstance(second, pb.CasResponse)
        assert (first.ok.committed, second.ok.committed) == (True, False)
        found = await head(pb.HeadRequest(key="k", fresh=True).SerializeToString())
        assert isinstance(found, pb.HeadResponse)
        assert found.ok.current.data == b"x"
        assert found.incarnation == server.committer.incarnation


@pytest.mark.parametrize("kind", ErrorKind)
@pytest.mark.parametrize("cls", [Determinate, Indeterminate])
async def test_every_error_arrives_unchanged(cls: type[ConsensusError], kind: ErrorKind) -> None:
    """Class and kind, as data or as a status, in a session or in a call of its own."""
    backend = ScriptedBackend()
    # What is not final is tried again until the deadline, which a busy machine must reach, too.
    deadline_s = 30.0 if kind.final else 1.5
    options = RpcOptions(read_s=deadline_s, write_s=deadline_s)
    async with connected(backend, options) as (_, store):
        assert await store.compare_and_set("k", V(0, b"")) is COMMITTED
        error = cls(kind, "outer")
        error.__cause__ = ValueError("password=hunter2 host=db: inner cause")
        backend.before = {op: failing(error) for op in ("head", "truncate")}
        for call in (store.head("k", fresh=True), store.truncate("k", 0)):
            with pytest.raises(ConsensusError) as caught:
                await call
            assert type(caught.value) is cls
            assert caught.value.kind is kind
            assert "outer" in caught.value.message
            if kind not in wire.STATUS:
                assert "inner cause" in caught.value.message
            assert "hunter2" not in str(caught.value)


@pytest.mark.postgres
async def test_a_lost_table_is_named_with_its_sqlstate(postgres_url: str) -> None:
    """Not "db error"."""
    async with served(await open_backend(postgres_url)) as server:
        store = RpcConsensus(server.url)
        assert await store.compare_and_set("k", V(0, b"")) is COMMITTED
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as admin:
            await admin.execute("DROP SCHEMA penstock CASCADE")
        with pytest.raises(Determinate) as caught:
            await store.head("k", fresh=True)
        assert caught.value.kind is ErrorKind.UNDEFINED_TABLE
        assert "42P01" in caught.value.message
        assert "penstock.consensus_meta" in caught.value.message
        await store.close()


@pytest.mark.parametrize(
    ("code", "trailer", "cls", "kind"),
    [
        pytest.param("RESOURCE_EXHAUSTED", False, Indeterminate, "UNAVAILABLE", id="unproven"),
        pytest.param("RESOURCE_EXHAUSTED", True, Determinate, "OVERLOADED", id="refused"),
        pytest.param("DEADLINE_EXCEEDED", False, Indeterminate, "TIMEOUT", id="deadline"),
        pytest.param("UNAVAILABLE", False, Indeterminate, "UNAVAILABLE", id="gone"),
        pytest.param("UNAUTHENTICATED", False, Indeterminate, "UNAVAILABLE", id="not by us"),
        pytest.param("UNKNOWN", False, Indeterminate, "UNAVAILABLE", id="unknown"),
    ],
)
def test_a_status_proves_nothing_without_its_trailer(
    code: str, trailer: bool, cls: type[ConsensusError], kind: str
) -> None:
    trailers = [(wire.DETERMINACY_TRAILER, wire.DETERMINATE), (wire.RETRY_TRAILER, "7")]
    error = wire.status_error(
        aio.AioRpcError(
            grpc.StatusCode[code], aio.Metadata(), aio.Metadata(*trailers if trailer else ())
        )
    )
    assert type(error) is cls
    assert error.kind.name == kind
    assert error.retry_after_ms == (7 if trailer else None)


def test_an_error_of_a_newer_server_is_read_with_caution() -> None:
    error = wire.from_error(pb.OpError(determinacy=7, kind="BRAND_NEW", message="m"))  # type: ignore[arg-type]
    assert isinstance(error, Indeterminate)
    assert error.kind is ErrorKind.INTERNAL


# ------------------------------------------------------------------------------------------- sizes


async def test_sizes_have_one_limit_and_it_is_ours() -> None:
    """The limit of gRPC itself, 4 MiB, would turn into a retry for ever."""
    async with connected() as (_, store):
        for seqno in range(8):
            assert (
                await store.compare_and_set("k", V(seqno, bytes([seqno]) * (8 << 20))) is COMMITTED
            )
        entries = await store.scan("k", 0)  # 64 MiB, in pages
        assert [(e.seqno, len(e.data), e.data[0]) for e in entries] == [
            (n, 8 << 20, n) for n in range(8)
        ]
        largest = V(0, bytes(ENTRY_BYTES_MAX))
        assert await store.compare_and_set("largest", largest) is COMMITTED
        assert await store.head("largest") == largest
        with pytest.raises(Determinate) as caught:
            await store.compare_and_set("larger", V(0, bytes(ENTRY_BYTES_MAX + 1)))
        assert caught.value.kind is ErrorKind.TOO_LARGE


@pytest.mark.parametrize(
    "key", ["ключ/№", "a b\t\n", "'; DROP TABLE x; --", "%_\\", "\u200b", "🦆"]
)
async def test_odd_keys_are_keys(key: str) -> None:
    async with connected() as (_, store):
        assert await store.compare_and_set(key, V(0, b"x")) is COMMITTED
        assert await store.head(key) == V(0, b"x")
        assert [k async for k in store.list_keys(key)] == [key]


# ---------------------------------------------------------------------------------------- sessions


async def test_what_is_asked_at_once_goes_together() -> None:
    backend = ScriptedBackend()
    async with connected(backend) as (server, store):
        asked = [store.compare_and_set(f"k/{n}", V(0, b"%d" % n)) for n in range(500)]
        assert set(await asyncio.gather(*asked)) == {COMMITTED}
        assert backend.calls["commit"] < 50
        heads = await asyncio.gather(*[store.head(f"k/{n}") for n in range(500)])
        assert [head.data for head in heads if head] == [b"%d" % n for n in range(500)]
        assert server.committer.metrics.rpc.labels("cas", "rejected").value == 0


async def test_one_bad_element_fails_none_of_its_neighbours() -> None:
    async with served(MemoryBackend()) as server, aio.insecure_channel(server.url[7:]) as channel:
        session = channel.stream_stream(
            f"/{wire.SERVICE}/Session",
            request_serializer=pb.SessionRequest.SerializeToString,
            response_deserializer=pb.SessionResponse.FromString,
        )()
        await session.write(pb.SessionRequest())
        opening = await session.read()
        assert opening.window == server.committer.options.limits.client_inflight_max
        batch = pb.SessionRequest(
            first=10,
            cas_key=["a", "", "a", "b", "short"],
            cas_seqno=[0, 0, 2**63, 5],
            cas_data=[b"x", b"x", b"x", b"x"],
            head_key=["nowhere", "bad\0key"],
        )
        await session.write(batch)
        outcomes: dict[int, str] = {}
        while len(outcomes) < 7:
            answers = await session.read()
            outcomes |= dict.fromkeys(answers.committed, "committed")
            outcomes |= dict.fromkeys(answers.mismatched, "mismatch")
            outcomes |= dict.fromkeys(answers.absent, "absent")
            outcomes |= {n: e.kind for n, e in zip(answers.failed, answers.errors, strict=True)}
        invalid = "INVALID_ARGUMENT"
        assert [outcomes[n] for n in range(10, 17)] == [
            "committed", invalid, invalid, "mismatch", invalid, "absent", invalid,
        ]  # fmt: skip
        await session.done_writing()
        assert await session.read() is aio.EOF


async def test_a_session_that_breaks_leaves_sent_appends_unknown_and_never_resends_them() -> None:
    """The entry may have landed; only the state log can find out."""
    backend = ScriptedBackend()
    release = asyncio.Event()

    async def hold() -> None:
        await release.wait()

    async with connected(backend) as (server, store):
        assert await store.head("k") is None
        backend.before["commit"] = hold
        asked = asyncio.create_task(store.compare_and_set("k", V(0, b"once")))
        await eventually(lambda: backend.calls["commit"] == 1)
        await server.server.stop(0)
        with pytest.raises(Indeterminate):
            await asked
        release.set()
        await eventually(lambda: server.committer.admission.inflight == 0)
    assert backend.calls["commit"] == 1
    assert await _Reopened(backend).head("k") == V(0, b"once")


async def test_heads_that_were_under_way_are_asked_again() -> None:
    backend = ScriptedBackend()
    release = asyncio.Event()

    async def hold() -> None:
        await release.wait()

    async with served(backend) as first:
        store = RpcConsensus(first.url)
        assert await store.compare_and_set("k", V(0, b"x")) is COMMITTED
        backend.before["head"] = hold
        asked = asyncio.create_task(store.head("k", fresh=True))
        await eventually(lambda: backend.calls["head"] == 1)
        await first.server.stop(0)
        release.set()
        async with served(_Reopened(backend), port=first.port):
            assert await asked == V(0, b"x")
        await store.close()


async def test_a_committer_that_cannot_be_reached_has_seen_nothing() -> None:
    store = RpcConsensus(
        f"grpc://127.0.0.1:{free_port()}", RpcOptions(write_s=0.3, read_s=0.3, page_s=0.3)
    )
    calls = (
        store.compare_and_set("k", V(0, b"")),
        store.compare_and_set("k", V(0, bytes(1 << 20))),
        store.compare_and_set_all([("k", V(0, b""))]),
    )
    for call in calls:
        with pytest.raises(Determinate) as caught:
            await call
        assert caught.value.kind is ErrorKind.UNAVAILABLE
    with pytest.raises(ConsensusError):
        await store.head("k")
    with pytest.raises(ConsensusError):
        await store.scan("k", 0)
    await store.close()


async def test_a_deadline_leaves_an_append_unknown() -> None:
    backend = ScriptedBackend()
    async with connected(backend, RpcOptions(write_s=0.3)) as (_, store):
        assert await store.head("k") is None
        release = asyncio.Event()

        async def hold() -> None:
            await release.wait()

        backend.before["commit"] = hold
        for size in (1, 1 << 20):  # through the session, and alone
            with pytest.raises(Indeterminate) as caught:
                await store.compare_and_set(f"k/{size}", V(0, bytes(size)))
            assert caught.value.kind is ErrorKind.TIMEOUT
        release.set()


async def test_cancelling_a_caller_cancels_only_its_waiting() -> None:
    backend = ScriptedBackend()
    async with connected(backend) as (_, store):
        asked = asyncio.create_task(store.compare_and_set("k", V(0, b"x")))
        await eventually(lambda: backend.calls["commit"] == 1)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        assert await store.compare_and_set("k", V(0, b"y")) is MISMATCH


async def test_a_server_that_comes_back_is_found_again() -> None:
    """Clients outlive the process that served them."""
    backend = MemoryBackend()
    async with served(backend) as first:
        store = RpcConsensus(first.url)
        assert await store.compare_and_set("k", V(0, b"")) is COMMITTED
        await first.server.stop(0)
        waiting = asyncio.create_task(store.head("k", fresh=True))
        await asyncio.sleep(0.05)
        async with served(_Reopened(backend), port=first.port):
            assert await waiting == V(0, b"")
            assert await store.compare_and_set("k", V(1, b"")) is COMMITTED
            assert await store.scan("k", 0) == [V(0, b""), V(1, b"")]
        await store.close()


class _Reopened(MemoryBackend):
    """The same memory, opened by the next process."""

    def __init__(self, former: MemoryBackend) -> None:
        super().__init__()
        self.__dict__.update(former.__dict__ | {"_closed": False, "before": {}, "after": {}})
        self.calls: Counter[str] = Counter()


# --------------------------------------------------------------------------------------- lifecycle


def test_a_client_may_be_made_before_there_is_a_loop() -> None:
    port = free_port()
    store = RpcConsensus(f"grpc://127.0.0.1:{port}")

    async def main() -> None:
        async with served(MemoryBackend(), port=port):
            assert await store.head("k") is None
            await store.close()

    asyncio.run(main())


async def test_connections_are_logged_once_on_either_side(caplog: pytest.LogCaptureFixture) -> None:
    """Over a hundred calls and three reconnects."""
    caplog.set_level(logging.INFO, "penstock")
    backend = MemoryBackend()
    port = free_port()
    store = RpcConsensus(f"grpc://127.0.0.1:{port}", client_id="me")
    received = []
    for round_ in range(4):
        async with served(_Reopened(backend), port=port):
            for n in range(25):
                await store.head(f"{round_}/{n}", fresh=True)
        received.append(sum("Received connection" in r.message for r in caplog.records))
    await store.close()
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count(f"Connecting to persistd: grpc://127.0.0.1:{port}") == 1
    assert messages.count(f"Connected to persistd: grpc://127.0.0.1:{port}") == 1
    assert received == [1, 2, 3, 4]  # each server saw one client, once
    assert "Received connection from: 127.0.0.1 client=me" in messages


async def test_in_process_and_network_callers_do_not_lock_each_other_out() -> None:
    """A process is refused a connection to itself."""
    async with connected() as (server, store):
        own = InProcessConsensus(server.committer)
        results = await asyncio.gather(
            *[own.compare_and_set(f"own/{n}", V(0, b"")) for n in range(500)],
            *[store.compare_and_set(f"net/{n}", V(0, b"")) for n in range(500)],
        )
        assert set(results) == {COMMITTED}
        with register_listener("127.0.0.1", server.port):
            for host in ("127.0.0.1", "localhost"):
                with pytest.raises(UsageError, match="hosts that committer"):
                    RpcConsensus(f"grpc://{host}:{server.port}")


async def test_a_client_that_knew_another_store_stops() -> None:
    """An orphan of one scenario meets the empty store of the next: an error, no ghosts."""
    async with served(MemoryBackend()) as first:
        store = RpcConsensus(first.url)
        assert await store.compare_and_set("k", V(0, b"")) is COMMITTED
    backend = ScriptedBackend()
    async with served(backend, port=first.port):
        calls: tuple[Callable[[], Awaitable[object]], ...] = (
            lambda: store.compare_and_set("k", V(0, b"")),
            lambda: store.head("k"),
            lambda: store.scan("k", 0),
            lambda: store.compare_and_set_all([("k", V(0, b""))]),
            lambda: take(store.subscribe("k", 0), lambda _: False),
            lambda: take(store.watch("", 0), lambda _: False),
        )
        for call in calls:
            with pytest.raises(Determinate) as caught:
                await answered(call)
            assert caught.value.kind is ErrorKind.STORE_RESET
        assert backend.calls["commit"] == 0
    await store.close()


async def answered(call: Callable[[], Awaitable[object]]) -> object:
    """Its answer by a server that is there: the pipe to one that has gone may not have ended."""
    while True:
        try:
            return await call()
        except Indeterminate:
            await asyncio.sleep(0.01)


# ----------------------------------------------------------------------------------------- streams


async def test_streams_go_on_behind_a_restart_without_gap_or_repetition() -> None:
    backend = MemoryBackend()
    async with served(backend) as first:
        store = RpcConsensus(first.url)
        events, all_ = store.subscribe("k", 0), store.watch("", 0)
        for n in range(3):
            assert await store.compare_and_set("k", V(n, b"")) is COMMITTED
        got = [await _next_entry(events) for _ in range(3)]
        seen = [await _next_entries(all_) for _ in range(3)]
    again = _Reopened(backend)
    async with served(again, port=first.port):
        for n in range(3, 6):
            await _commit_in_the_end(store, n)
        got += [await _next_entry(events) for _ in range(3)]
        seen += [await _next_entries(all_) for _ in range(3)]
        for stream in (events, all_):
            await stream.aclose()
        await store.close()
    assert got == [0, 1, 2, 3, 4, 5]
    assert seen == [1, 2, 3, 4, 5, 6]


async def _commit_in_the_end(store: RpcConsensus, n: int) -> None:
    """The first request may meet the end of the old connection, and its outcome be unknown."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(Indeterminate, Determinate):
                head = await store.head("k")
                if head is not None and head.seqno == n:
                    return
                assert await store.compare_and_set("k", V(n, b"")) is COMMITTED
                return


async def _next_entry(events: AsyncIterator[object]) -> int:
    async with asyncio.timeout(30):
        while True:
            event = await anext(events)
            if isinstance(event, Entry):
                return event.data.seqno


async def _next_entries(events: AsyncIterator[object]) -> int:
    async with asyncio.timeout(30):
        while True:
            event = await anext(events)
            if isinstance(event, Entries):
                return event.revision


@asynccontextmanager
async def impostor(
    method: str, events: Callable[[int], AsyncIterator[pb.SubscribeEvent]]
) -> AsyncIterator[RpcConsensus]:
    """A server that misbehaves in a stream; `events` is given the number of the attempt."""
    attempts = iter(range(100))

    async def handle(_: object, __: object) -> AsyncIterator[pb.SubscribeEvent]:
        async for event in events(next(attempts)):
            yield event

    server = aio.server()
    handler = grpc.unary_stream_rpc_method_handler(
        handle,
        request_deserializer=pb.SubscribeRequest.FromString,
        response_serializer=pb.SubscribeEvent.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(wire.SERVICE, {method: handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    store = RpcConsensus(f"grpc://127.0.0.1:{port}", RpcOptions(silence_s=0.2))
    try:
        yield store
    finally:
        await store.close()
        await server.stop(0)


def _entry(seqno: int) -> pb.SubscribeEvent:
    return pb.SubscribeEvent(entry=pb.Versioned(seqno=seqno), incarnation=b"i")


async def test_a_gap_is_noticed_and_read_again() -> None:
    async def events(attempt: int) -> AsyncIterator[pb.SubscribeEvent]:
        for seqno in ((0, 2), (1, 0, 2))[attempt]:
            yield _entry(seqno)

    async with impostor("Subscribe", events) as store:
        taken = await take(store.subscribe("k", 0), lambda e: len(e) == 3)
        assert [event.data.seqno for event in taken if isinstance(event, Entry)] == [0, 1, 2]
        assert store.gaps == 1


async def test_silence_is_the_end_of_a_stream() -> None:
    async def events(attempt: int) -> AsyncIterator[pb.SubscribeEvent]:
        yield _entry(attempt)
        if attempt == 0:
            await asyncio.sleep(3600)

    async with impostor("Subscribe", events) as store:
        taken = await take(store.subscribe("k", 0), lambda e: len(e) == 2)
        assert len(taken) == 2


# ------------------------------------------------------------------------------- refusals, garbage


async def test_overload_is_a_status_that_proves_itself() -> None:
    backend = ScriptedBackend()
    release = asyncio.Event()

    async def hold() -> None:
        await release.wait()

    backend.before["truncate"] = hold
    async with served(backend, replace(CACHED, limits=Limits(inflight_max=4))) as server:
        store = RpcConsensus(server.url, RpcOptions(write_s=1))
        running = asyncio.create_task(store.truncate("k", 0))
        await eventually(lambda: backend.calls["truncate"] == 1)
        with pytest.raises(Determinate) as caught:  # a quarter of four is one
            await store.compare_and_set("k", V(0, bytes(1 << 20)))
        assert caught.value.kind is ErrorKind.OVERLOADED
        assert caught.value.retry_after_ms
        async with aio.insecure_channel(server.url[7:]) as channel:
            server.committer.admission.enter(None)
            server.committer.admission.enter(None)
            server.committer.admission.enter(None)
            with pytest.raises(aio.AioRpcError) as status:
                await raw(channel, "Truncate", pb.TruncateResponse)(
                    pb.TruncateRequest(key="k").SerializeToString()
                )
        assert status.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailers = dict(status.value.trailing_metadata() or ())
        assert trailers["penstock-determinacy"] == "determinate"
        assert int(trailers["retry-after-ms"]) > 0
        release.set()
        await asyncio.gather(running, return_exceptions=True)
        await store.close()


async def test_tokens_open_their_prefix_and_nothing_else(tmp_path: Path) -> None:
    digest = hashlib.sha256
    file = tmp_path / "tokens"
    file.write_text(
        f"r reader a/ {digest(b'read').hexdigest()}\nw writer a/ {digest(b'write').hexdigest()}\n"
        f"x admin * {digest(b'all').hexdigest()}\n"
    )

    def client(token: str) -> RpcConsensus:
        path = tmp_path / token
        path.write_text(token + "\n")
        return RpcConsensus(f"{server.url}?token_file={path}")

    async def refused(kind: ErrorKind, call: Awaitable[object]) -> None:
        with pytest.raises(Determinate) as caught:
            await call
        assert caught.value.kind is kind

    async with served(MemoryBackend(), tokens=TokenFile(file)) as server:
        reader, writer, admin, nobody = map(client, ("read", "write", "all", "wrong"))
        assert await writer.compare_and_set("a/k", V(0, b"")) is COMMITTED
        assert await reader.head("a/k") == V(0, b"")
        assert (await take(reader.subscribe("a/k", 0), lambda e: isinstance(e[-1], CaughtUp)))[0]
        assert (await take(reader.watch("a/", 0), lambda e: isinstance(e[-1], WatchProgress)))[0]
        assert [key async for key in admin.list_keys()] == ["a/k"]
        denied = ErrorKind.PERMISSION_DENIED
        await refused(denied, reader.compare_and_set("a/k", V(1, b"")))
        await refused(denied, reader.truncate("a/k", 0))
        await refused(denied, reader.head("b/k"))
        await refused(denied, take(reader.watch("", 0), bool))
        await refused(denied, writer.compare_and_set("b/k", V(0, b"")))
        await refused(denied, writer.compare_and_set_all([("a/x", V(0, b"")), ("b", V(0, b""))]))
        await refused(denied, take(writer.list_keys(), bool))
        assert [key async for key in reader.list_keys("a/")] == ["a/k"]
        outcomes = await writer.compare_and_set_many([("b/k", V(0, b""))])
        assert isinstance(outcomes[0], Determinate)
        unknown = ErrorKind.UNAUTHENTICATED
        for stranger in (nobody, RpcConsensus(server.url)):
            await refused(unknown, stranger.head("a/k"))
            await refused(unknown, stranger.compare_and_set("a/k", V(1, b"")))
            await refused(unknown, stranger.scan("a/k", 0))
            await refused(unknown, take(stranger.subscribe("a/k", 0), bool))
            await stranger.close()
        for store in (reader, writer, admin):
            await store.close()


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"\x00\x01\x02\xff" * 64, id="noise"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", id="HTTP/1"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x40\x00\x01", id="a truncated frame"),
        pytest.param(b"", id="nothing"),
    ],
)
async def test_garbage_on_the_port_disturbs_no_client(garbage: bytes) -> None:
    async with connected() as (server, store):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(garbage)
        await writer.drain()
        assert await store.compare_and_set("k", V(0, b"")) is COMMITTED
        writer.close()
        assert await store.head("k", fresh=True) == V(0, b"")


async def test_a_connection_that_never_becomes_one_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "_HANDSHAKE_MS", 200)
    server = aio.server(options=server_options())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(30):
        while await reader.read(1_000):
            pass
    writer.close()
    await server.stop(None)


async def test_a_message_that_is_none_is_an_error_and_not_a_hang() -> None:
    async with connected() as (server, store), aio.insecure_channel(server.url[7:]) as channel:
        async with asyncio.timeout(30):
            answer = await raw(channel, "Head", pb.HeadResponse)(b"\xff\xff\xff\xff")
        assert isinstance(answer, pb.HeadResponse)
        assert answer.err.kind == "INVALID_ARGUMENT"
        session = channel.stream_stream(
            f"/{wire.SERVICE}/Session", response_deserializer=pb.SessionResponse.FromString
        )()
        await session.write(b"\xff\xff\xff\xff")
        async with asyncio.timeout(30):
            assert (await session.read()).err.kind == "INVALID_ARGUMENT"
        assert await store.head("k") is None


async def test_closing_leaves_no_task_behind() -> None:
    async with connected() as (_, store):
        await store.compare_and_set("k", V(0, b""))
        async with aclosing(store.watch("", 0)) as events:
            await anext(events)
        await store.close()
        left = {task.get_name() for task in asyncio.all_tasks()}
        assert not any("session" in name for name in left)
        with pytest.raises(Determinate):
            await store.head("k")


async def test_a_reader_that_never_reads_is_closed_and_the_next_attempt_misses_nothing() -> None:
    """Flow control holds the server's write; its buffer and its patience are both bounded."""
    hasty = replace(CACHED, limits=Limits(slow_s=0.3))
    async with (
        connected(committer=hasty) as (server, store),
        aio.insecure_channel(server.url[7:]) as channel,
    ):
        stuck = channel.unary_stream(
            f"/{wire.SERVICE}/Subscribe", request_serializer=pb.SubscribeRequest.SerializeToString
        )(pb.SubscribeRequest(key="k"))
        await eventually(lambda: server.committer.admission.subscribers == 1)
        for n in range(200):
            assert await store.compare_and_set("k", V(n, bytes(200 << 10))) is COMMITTED
        await eventually(lambda: server.committer.admission.subscribers == 0)
        with contextlib.suppress(aio.AioRpcError):  # once it reads what was on its way
            while await stuck.read() is not aio.EOF:
                pass
        assert await stuck.code() is grpc.StatusCode.ABORTED
        events = await take(store.subscribe("k", 0), lambda e: isinstance(e[-1], CaughtUp))
        got = [event.data.seqno for event in events if isinstance(event, Entry)]
        assert got == list(range(200))
