"""Clients that mean harm, or are broken: each is answered, none costs more than its share.

Against a real daemon, whose memory is measured from outside. What it cost before is in each test.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc import aio

from consensus.committer.daemon import Daemon, running_persistd
from consensus.committer.hostile import (
    MIB,
    PATIENCE_S,
    Told,
    answer_of,
    connecting,
    hostile,
    peak_mib,
)
from penstock.consensus.committer import wire
from penstock.consensus.committer.client import RpcConsensus
from penstock.consensus.committer.proto import consensus_pb2 as pb
from penstock.consensus.store import SEQNO_MAX, CasResult, ConsensusError, VersionedData
from penstock.errors import PenstockError, UserError
from servicekit.rpc.certificates import certificate

V = VersionedData
COMMITTED = CasResult.COMMITTED
TOKEN = "let-me-in"  # noqa: S105
ROGUE = "let-us-in"
"""A principal of its own: shares go by it."""


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    named = {"ops": TOKEN, "rogue": ROGUE}
    digests = {name: hashlib.sha256(token.encode()).hexdigest() for name, token in named.items()}
    path.write_text("".join(f"{name} admin * {digest}\n" for name, digest in digests.items()))
    path.chmod(0o600)
    return path


@pytest.fixture
def guarded(tmp_path: Path, token_file: Path) -> Iterator[Daemon]:
    store = f"sqlite:///{tmp_path}/consensus.db"
    with running_persistd(
        tmp_path, store, "--cache", "--token-file", str(token_file), "--stats-heartbeat-interval=0s"
    ) as daemon:
        yield daemon
        assert daemon.process.poll() is None, daemon.log
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.log, daemon.log


@asynccontextmanager
async def good_client(daemon: Daemon, tmp_path: Path) -> AsyncIterator[RpcConsensus]:
    secret = tmp_path / "token"
    secret.write_text(TOKEN)
    secret.chmod(0o600)
    store = RpcConsensus(f"{daemon.url}?token_file={secret}", client_id="good")
    try:
        yield store
    finally:
        await store.close()


async def serves(store: RpcConsensus, key: str = "good") -> None:
    """Appends and reads of a client that keeps to the rules."""
    head = await store.head(key, fresh=True)
    seqno = 0 if head is None else head.seqno + 1
    for n in range(seqno, seqno + 5):
        assert await store.compare_and_set(key, V(n, b"%d" % n)) is COMMITTED
    assert await store.head(key) == V(seqno + 4, b"%d" % (seqno + 4))
    assert len(await store.scan(key, seqno)) == 5


async def test_a_body_without_a_token_is_not_read(guarded: Daemon, tmp_path: Path) -> None:
    """Two of 400 MB took the daemon from 65 to 1,826 MB."""
    before = peak_mib(guarded.process.pid) if guarded.address else 0.0
    body = pb.CasRequest(key="k", new=pb.Versioned(data=bytes(150 * MIB))).SerializeToString()
    async with hostile(guarded.url) as nobody, good_client(guarded, tmp_path) as store:
        sent = [nobody.send(m, body) for m in ("Cas", "CasAll", "Watch", "Session")]
        told = await asyncio.gather(*sent, serves(store))
        for each in told[:-1]:
            assert isinstance(each, Told)
            assert each.code is grpc.StatusCode.UNAUTHENTICATED, each
    assert peak_mib(guarded.process.pid) - before < 40


async def test_a_message_has_a_limit_that_is_named_and_no_disguise(
    guarded: Daemon, tmp_path: Path
) -> None:
    """A compressed message is refused as such: a megabyte of it would be a gigabyte."""
    before = peak_mib(guarded.process.pid) if guarded.address else 0.0
    large = pb.CasRequest(key="k", new=pb.Versioned(data=bytes(150 * MIB))).SerializeToString()
    async with (
        hostile(guarded.url, token=ROGUE) as somebody,
        good_client(guarded, tmp_path) as store,
    ):
        told = await asyncio.gather(*[somebody.send(m, large) for m in ("Cas", "CasMany", "Watch")])
        for each in told:
            assert isinstance(each, Told)
            assert each.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(MIB) in each.details
        session = await somebody.session()
        await session.write(large)
        assert await session.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        bomb = await somebody.send("Cas", large, grpc.Compression.Gzip)
        assert isinstance(bomb, Told)
        assert bomb.code is grpc.StatusCode.UNIMPLEMENTED
        assert "gzip" in bomb.details
        await serves(store)
    assert peak_mib(guarded.process.pid) - before < 40


async def test_unread_heads_are_not_all_read_from_the_store(
    guarded: Daemon, tmp_path: Path
) -> None:
    """1,024 of a megabyte took the daemon from 70 to 1,231 MB."""
    async with good_client(guarded, tmp_path) as store, AsyncExitStack() as stack:
        assert await store.compare_and_set("large", V(0, bytes(MIB))) is COMMITTED
        before = peak_mib(guarded.process.pid)
        asked = pb.SessionRequest(head_key=["large"] * 64).SerializeToString()
        writing = []
        for n in range(4):
            somebody = await stack.enter_async_context(
                hostile(guarded.url, token=ROGUE, client=f"hostile {n}")
            )
            for _ in range(8):
                session = await somebody.session()
                for _ in range(8):  # it is held back before all of them are sent
                    writing.append(asyncio.ensure_future(session.write(asked)))
                    await asyncio.wait(writing[-1:], timeout=0.02)
                    if not writing[-1].done():
                        break
        await serves(store)
        await asyncio.sleep(1)
        await serves(store)
        assert peak_mib(guarded.process.pid) - before < 150
    await asyncio.gather(*writing, return_exceptions=True)


async def test_unread_pages_and_events_are_bounded(guarded: Daemon, tmp_path: Path) -> None:
    async with good_client(guarded, tmp_path) as store, AsyncExitStack() as stack:
        for n in range(32):
            assert await store.compare_and_set("log/large", V(n, bytes(MIB))) is COMMITTED
        before = peak_mib(guarded.process.pid)
        scan = pb.ScanRequest(key="log/large", limit=SEQNO_MAX).SerializeToString()
        snapshot = pb.SnapshotRequest(prefix="log/").SerializeToString()
        watch = pb.WatchRequest(prefix="log/").SerializeToString()
        subscribe = pb.SubscribeRequest(key="log/large").SerializeToString()
        calls = []
        for n in range(2):
            somebody = await stack.enter_async_context(
                hostile(guarded.url, token=ROGUE, client=f"hostile {n}")
            )
            for _ in range(25):
                calls += [somebody.unread("Scan", scan), somebody.unread("Snapshot", snapshot)]
                calls += [somebody.unread("Watch", watch)]
                calls += [somebody.unread("Subscribe", subscribe)]
        for _ in range(3):
            await asyncio.sleep(0.5)
            await serves(store)
        # 200 pages of 8 MiB, and what gRPC makes of each, would be some 3 GiB. These two clients
        # may have half of --max-unread-bytes, ours and gRPC's copy.
        assert peak_mib(guarded.process.pid) - before < 300
        for call in calls:
            call.cancel()


async def test_a_message_has_a_limited_number_of_operations(
    guarded: Daemon, tmp_path: Path
) -> None:
    """200,000 of them kept all clients waiting for 13 s."""
    async with (
        hostile(guarded.url, token=ROGUE) as somebody,
        good_client(guarded, tmp_path) as store,
    ):
        session = await somebody.session()
        await session.write(pb.SessionRequest(head_key=["k"] * 200_000).SerializeToString())
        broken = await answer_of(session)
        assert broken.err.kind == "TOO_LARGE"
        assert "200000" in broken.err.message
        assert "256" in broken.err.message
        items = [pb.CasItem(key="k", new=pb.Versioned())] * 5_000
        for method, response in (("CasMany", pb.CasManyResponse), ("CasAll", pb.CasResponse)):
            answer = await somebody.send(
                method, pb.CasBatchRequest(items=items).SerializeToString()
            )
            assert isinstance(answer, bytes)
            error = response.FromString(answer).err
            assert error.kind == "TOO_LARGE"
            assert "1000 is the limit" in error.message
        await serves(store)


async def test_clients_split_what_is_larger_than_a_message(guarded: Daemon, tmp_path: Path) -> None:
    async with good_client(guarded, tmp_path) as store:
        batch = [(f"many/{n % 7}", V(n // 7, bytes(300 * (n % 50)))) for n in range(2_500)]
        assert set(await store.compare_and_set_many(batch)) == {COMMITTED}
        large = [("large/a", V(0, b"a" * (3 * MIB))), ("large/b", V(0, b"b" * (5 * MIB)))]
        assert await store.compare_and_set_many(large) == [COMMITTED, COMMITTED]
        assert [await store.head(key, fresh=True) for key, _ in large] == [v for _, v in large]
        atomic = [(f"{n:0500}", V(0, bytes(4_000))) for n in range(1_000)]  # and 500 KB of keys
        assert await store.compare_and_set_all(atomic) is COMMITTED
        assert await store.compare_and_set_all(atomic) is CasResult.EXPECTATION_MISMATCH


@pytest.mark.parametrize(
    ("first", "others", "kind", "named"),
    [
        pytest.param({"bytes": 2**64 - 1, "more": True}, [], "TOO_LARGE", "limit", id="declared"),
        pytest.param(
            {"bytes": 3, "more": True},
            [{"items": [b"1234"]}],
            "INVALID_ARGUMENT",
            "said",
            id="more",
        ),
        pytest.param({"bytes": 9, "more": True}, [], "INVALID_ARGUMENT", "ends", id="ends early"),
    ],
)
async def test_a_batch_in_parts_has_its_announced_size(
    guarded: Daemon,
    first: dict[str, int],
    others: list[dict[str, list[bytes]]],
    kind: str,
    named: str,
) -> None:
    async with hostile(guarded.url, token=ROGUE) as somebody:
        stream = somebody.stream("CasMany")
        await stream.write(pb.CasBatchRequest(**first).SerializeToString())
        for part in others:
            items = [pb.CasItem(key="k", new=pb.Versioned(data=d)) for d in part["items"]]
            await stream.write(pb.CasBatchRequest(items=items).SerializeToString())
        await stream.done_writing()
        async with asyncio.timeout(PATIENCE_S):
            answer = pb.CasManyResponse.FromString(await stream.read())
        assert answer.err.kind == kind
        assert named in answer.err.message


async def test_a_request_that_does_not_come_ends_its_call(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/consensus.db"
    with running_persistd(tmp_path, store, "--request-timeout", "300ms") as daemon:
        async with hostile(daemon.url) as somebody:
            silent = somebody.stream("Cas")
            await silent.wait_for_connection()
            async with asyncio.timeout(PATIENCE_S):
                answer = pb.CasResponse.FromString(await silent.read())
            assert answer.err.kind == "TIMEOUT"
            half = somebody.stream("CasMany")
            await half.write(pb.CasBatchRequest(bytes=60 * MIB, more=True).SerializeToString())
            async with asyncio.timeout(PATIENCE_S):
                late = pb.CasManyResponse.FromString(await half.read())
            assert late.err.kind == "TIMEOUT"
            client = RpcConsensus(daemon.url)  # and the room that it had is free again
            assert await client.compare_and_set("k", V(0, bytes(60 * MIB))) is COMMITTED
            await client.close()
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.log


ODD = [
    ("Head", pb.HeadRequest(key="k\0"), pb.HeadResponse),
    ("Head", pb.HeadRequest(key="k" * 513), pb.HeadResponse),
    ("Head", pb.HeadRequest(key="k" * 1_000_000), pb.HeadResponse),
    ("Cas", pb.CasRequest(key="k", new=pb.Versioned(seqno=2**64 - 1)), pb.CasResponse),
    ("Scan", pb.ScanRequest(key="k", limit=2**64 - 1), pb.ScanResponse),
    ("Truncate", pb.TruncateRequest(key="k", seqno=2**63), pb.TruncateResponse),
    ("ListKeys", pb.ListKeysRequest(after="a\0"), pb.ListKeysResponse),
    ("ListKeys", pb.ListKeysRequest(after="a" * 100_000), pb.ListKeysResponse),
    ("Snapshot", pb.SnapshotRequest(revision=2**64 - 1), pb.SnapshotResponse),
    ("Snapshot", pb.SnapshotRequest(position=pb.Position(seqno=-2)), pb.SnapshotResponse),
    ("Snapshot", pb.SnapshotRequest(position=pb.Position(key="\0")), pb.SnapshotResponse),
    ("Snapshot", pb.SnapshotRequest(position=pb.Position(key="k" * 9_999)), pb.SnapshotResponse),
    ("Subscribe", pb.SubscribeRequest(key=""), pb.SubscribeEvent),
    ("Watch", pb.WatchRequest(from_revision=2**64 - 1), pb.WatchEvent),
    ("Watch", pb.WatchRequest(prefix="\0"), pb.WatchEvent),
]


async def test_odd_requests_are_refused_as_data(guarded: Daemon, tmp_path: Path) -> None:
    async with (
        hostile(guarded.url, token=ROGUE) as somebody,
        good_client(guarded, tmp_path) as store,
    ):
        await serves(store)
        for method, request, response in ODD:
            for body in (request.SerializeToString(), b"\xff\xff\xff\xff"):
                stream = somebody.stream(method)
                await stream.write(body)
                async with asyncio.timeout(PATIENCE_S):
                    answer = response.FromString(await stream.read())
                assert answer.err.kind == "INVALID_ARGUMENT", (method, request)
                assert answer.err.determinacy == pb.DETERMINATE
        for first in (b"\xff\xff", pb.SessionRequest(head_key=["k"]).SerializeToString()):
            session = somebody.stream("Session")
            await session.write(first)
            assert (await answer_of(session)).err.kind == "INVALID_ARGUMENT"
        for number in (2**64 - 1, 2**63 - 1):
            session = await somebody.session()
            numbered = pb.SessionRequest(first=number, head_key=["k"], cas_key=["k"])
            await session.write(numbered.SerializeToString())
            assert (await answer_of(session)).err.kind == "INVALID_ARGUMENT"
        session = await somebody.session()
        await session.write(b"\xff\xff\xff\xff")
        assert (await answer_of(session)).err.kind == "INVALID_ARGUMENT"
        empty = somebody.stream("Cas")
        await empty.done_writing()
        async with asyncio.timeout(PATIENCE_S):
            answer = pb.CasResponse.FromString(await empty.read())
        assert answer.err.kind == "INVALID_ARGUMENT"
        await serves(store)


async def test_places_are_limited_and_a_refusal_names_the_limit(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/consensus.db"
    flags = ("--max-sessions", "2", "--max-calls", "2")
    with running_persistd(tmp_path, store, *flags) as daemon:
        async with hostile(daemon.url) as somebody:
            first, second = [await somebody.session() for _ in range(2)]
            third = somebody.stream("Session")
            with contextlib.suppress(grpc.RpcError):  # it may be refused before it has sent that
                await third.write(b"")
            assert await third.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "2 sessions are open, 2 is the limit" in await third.details()
            trailers = dict(await third.trailing_metadata() or ())
            assert trailers[wire.DETERMINACY_TRAILER] == wire.DETERMINATE
            await first.done_writing()
            assert await first.read() is aio.EOF
            fourth = await somebody.session()
            waiting = [somebody.stream("Cas") for _ in range(2)]
            for call in waiting:
                await call.wait_for_connection()
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    told = await somebody.send("Truncate", b"")
                    if isinstance(told, Told):
                        break
            assert "2 calls are in progress, 2 is the limit" in told.details
            for call in (*waiting, second, fourth):
                call.cancel()
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.log


@pytest.mark.parametrize("rotating", [False, True])
async def test_connections_that_arrive_do_not_crash_it(tmp_path: Path, rotating: bool) -> None:
    """A few hundred TLS handshakes at once corrupted its memory, mostly seen at SIGTERM."""
    cert, key = certificate(tmp_path, "server")
    flags = ("--tls-cert", str(cert), "--tls-key", str(key))
    for n in range(2):
        store = f"sqlite:///{tmp_path}/consensus-{n}.db"
        with running_persistd(tmp_path, store, *flags) as daemon:
            port = int(daemon.address[0].rpartition(":")[2])
            with connecting(port) as made:
                for _ in range(4):
                    await asyncio.sleep(0.4)
                    if rotating:
                        os.utime(cert)
                assert daemon.process.poll() is None, daemon.log
                assert daemon.terminate() == 0, daemon.log
            assert made[0] > 100
            assert ("certificates reloaded" in daemon.log) is rotating


def test_a_token_file_that_is_no_text_is_refused_as_such(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_bytes(bytes(range(256)))
    tokens.chmod(0o600)
    store = f"sqlite:///{tmp_path}/consensus.db"
    with running_persistd(tmp_path, store, "--token-file", str(tokens)) as daemon:
        assert daemon.process.wait(PATIENCE_S) == UserError.exit_code
        assert "Traceback" not in daemon.log
        assert str(tokens) in daemon.log


@pytest.mark.parametrize("token", [bytes(range(256)), b"two\nlines", "schl\u00fcssel".encode()])
async def test_a_token_that_cannot_be_sent_is_the_users_mistake(
    tmp_path: Path, guarded: Daemon, token: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "binary"
    path.write_bytes(token)
    path.chmod(0o600)
    with pytest.raises(UserError, match="there is no token"):
        RpcConsensus(f"{guarded.url}?token_file={path}")
    path.write_text("t-hostile")
    client = RpcConsensus(f"{guarded.url}?token_file={path}")
    path.write_bytes(token)
    with pytest.raises(PenstockError) as caught:
        await client.scan("k", 0)
    assert str(path) in str(caught.value)
    with pytest.raises(ConsensusError) as of_session:
        await client.head("k")
    assert str(path) in str(of_session.value)
    await client.close()
    assert not [record for record in caplog.records if record.exc_info]
