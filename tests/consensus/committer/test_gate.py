"""A token opens nothing longer than it is in force, and guessing tokens gets a caller nowhere."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from grpc import aio

from consensus.committer.scripted import CACHED, COMMITTED, ScriptedBackend, V, eventually
from consensus.committer.serving import served
from penstock.consensus.committer import wire
from penstock.consensus.committer.client import RpcConsensus, RpcOptions
from penstock.consensus.committer.options import Limits
from penstock.consensus.committer.proto import consensus_pb2 as pb
from penstock.consensus.memory import MemoryBackend
from penstock.consensus.store import (
    ConsensusError,
    Determinate,
    Entries,
    ErrorKind,
    Indeterminate,
)
from penstock.servicekit.rpc import gate
from penstock.servicekit.rpc.tokens import TokenFile

PATIENCE_S = 20.0


class Tokens:
    """A token file, and files of the tokens themselves."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "tokens"
        self.lines: dict[str, str] = {}

    def add(self, name: str, token: str, role: str = "writer", rest: str = "") -> Path:
        digest = hashlib.sha256(token.encode()).hexdigest()
        self.lines[name] = f"{name} {role} * {digest} {rest}\n"
        self._write()
        return self.hold(name, token)

    def hold(self, name: str, token: str) -> Path:
        """Write the token file of the client of this name."""
        path = self.directory / f"{name}.token"
        path.write_text(token + "\n")
        return path

    def remove(self, name: str) -> None:
        del self.lines[name]
        self._write()

    def _write(self) -> None:
        self.path.write_text("".join(self.lines.values()))


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    tokens = Tokens(tmp_path)
    tokens.add("ops", "t-ops", "admin")
    return tokens


async def refused(call: Callable[[], Awaitable[object]]) -> ConsensusError:
    """The error that an operation ends with, once it does."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await call()
            except ConsensusError as error:
                return error
            await asyncio.sleep(0.05)


async def exhaust(events: AsyncIterator[object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        async for _ in events:
            pass


# ------------------------------------------------------------------------------------- revocation


async def test_a_revoked_token_ends_every_open_session_and_stream(tokens: Tokens) -> None:
    token = tokens.add("ann", "t-ann")
    async with served(MemoryBackend(), tokens=TokenFile(tokens.path)) as server:
        store = RpcConsensus(f"{server.url}?token_file={token}")
        assert await store.compare_and_set("k", V(0, b"")) is COMMITTED
        async with aclosing(store.watch("", 0)) as watch, aclosing(store.subscribe("k", 0)) as log:
            await anext(watch)
            await anext(log)
            tokens.remove("ann")
            for events in (watch, log):
                with pytest.raises(Determinate) as caught:
                    await exhaust(events)
                assert caught.value.kind is ErrorKind.UNAUTHENTICATED
        error = await refused(lambda: store.compare_and_set("other", V(0, b"")))
        assert error.kind is ErrorKind.UNAUTHENTICATED
        assert server.committer.admission.subscribers == 0
        await store.close()


async def test_an_open_session_ends_although_its_client_asks_nothing(tokens: Tokens) -> None:
    """A client of its own make, that would go on with the session it has."""
    tokens.add("ann", "t-ann")
    async with (
        served(MemoryBackend(), tokens=TokenFile(tokens.path)) as server,
        aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        session = channel.stream_stream(
            f"/{wire.SERVICE}/Session",
            request_serializer=pb.SessionRequest.SerializeToString,
            response_deserializer=pb.SessionResponse.FromString,
        )(metadata=(("authorization", "Bearer t-ann"),))
        await session.write(pb.SessionRequest())
        assert (await session.read()).window
        tokens.remove("ann")
        async with asyncio.timeout(PATIENCE_S):
            assert await session.code() is grpc.StatusCode.UNAUTHENTICATED
        trailers = dict(await session.trailing_metadata() or ())
        assert wire.DETERMINACY_TRAILER not in trailers  # much of it may have run


async def test_an_expired_token_ends_what_it_opened(tokens: Tokens) -> None:
    soon = datetime.now(UTC) + timedelta(seconds=2)
    token = tokens.add("ann", "t-ann", rest=f"until={soon.isoformat()}")
    async with served(MemoryBackend(), tokens=TokenFile(tokens.path)) as server:
        store = RpcConsensus(f"{server.url}?token_file={token}")
        async with aclosing(store.watch("", 0)) as watch:
            await anext(watch)
            with pytest.raises(Determinate, match="expired"):
                await exhaust(watch)
        await store.close()


async def test_a_rotated_client_goes_on_where_it_was(tokens: Tokens) -> None:
    token = tokens.add("ann", "t-old")
    async with served(MemoryBackend(), tokens=TokenFile(tokens.path)) as server:
        store = RpcConsensus(f"{server.url}?token_file={token}")
        seen: list[int] = []

        async def follow() -> None:
            async for event in store.watch("", 0):
                if isinstance(event, Entries):
                    seen.extend(data.seqno for _, data in event.entries)

        following = asyncio.create_task(follow())
        await commit(store, 0)
        tokens.add("ann2", "t-new")
        tokens.hold("ann", "t-new")
        tokens.remove("ann")
        for seqno in range(1, 30):
            await commit(store, seqno)
            await asyncio.sleep(0.1)
        await eventually(lambda: len(seen) >= 30)
        assert seen == list(range(30))
        following.cancel()
        await store.close()


async def commit(store: RpcConsensus, seqno: int) -> None:
    try:
        assert await store.compare_and_set("k", V(seqno, b"")) is COMMITTED
    except Indeterminate:  # the session ended under it
        head = await store.head("k", fresh=True)
        if head is None or head.seqno != seqno:
            await commit(store, seqno)


# --------------------------------------------------------------------------------------- failures


async def attempt(channel: aio.Channel, token: str) -> grpc.StatusCode:
    try:
        await channel.unary_unary(f"/{wire.SERVICE}/Head")(
            pb.HeadRequest(key="k").SerializeToString(),
            metadata=(("authorization", f"Bearer {token}"),),
        )
    except aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_failures_are_counted_logged_seldom_and_slowed(
    tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    attempts = 6
    async with (
        served(MemoryBackend(), tokens=TokenFile(tokens.path)) as server,
        aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        started = time.monotonic()
        for n in range(attempts):
            assert await attempt(channel, f"guess-{n}") is grpc.StatusCode.UNAUTHENTICATED
        took = time.monotonic() - started
        page = server.committer.metrics.registry.render().decode()
    assert took >= sum(min(gate.DELAY_S_MAX, gate.DELAY_S * 2**n) for n in range(attempts))
    assert f'penstock_persist_auth_failures_total{{reason="invalid"}} {attempts}.0' in page
    failures = [r for r in caplog.records if r.message == "authentication failed"]
    assert len(failures) == 1
    assert failures[0].__dict__["fields"]["peer"] == "127.0.0.1"
    assert "guess" not in caplog.text


async def test_one_connection_cannot_guess_in_parallel(tokens: Tokens) -> None:
    async with (
        served(MemoryBackend(), tokens=TokenFile(tokens.path)) as server,
        aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        guesses = [attempt(channel, f"guess-{n}") for n in range(200)]
        assert set(await asyncio.gather(*guesses)) == {grpc.StatusCode.UNAUTHENTICATED}
        counts = server.committer.metrics.auth_failures
        looked_at = counts.labels("invalid").value
        assert looked_at + counts.labels("waiting").value == 200
        assert looked_at < 50


async def test_a_valid_token_does_not_wait_for_the_failures_of_others(
    tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same host, while more attempts fail than are made to wait."""
    monkeypatch.setattr(gate, "DELAY_S", 30.0)
    monkeypatch.setattr(gate, "DELAY_S_MAX", 30.0)
    monkeypatch.setattr(gate, "WAITING_MAX", 4)
    token = tokens.add("ann", "t-ann")
    async with served(MemoryBackend(), tokens=TokenFile(tokens.path)) as server:
        own = (("grpc.use_local_subchannel_pool", 1),)
        target = f"127.0.0.1:{server.port}"
        channels = [aio.insecure_channel(target, options=own) for _ in range(8)]
        guesses = [asyncio.create_task(attempt(c, "guess")) for c in channels]
        await eventually(lambda: sum(guess.done() for guess in guesses) == 4)
        store = RpcConsensus(f"{server.url}?token_file={token}", RpcOptions(write_s=10))
        assert await store.compare_and_set("k", V(0, b"")) is COMMITTED
        assert sum(guess.done() for guess in guesses) == 4
        await store.close()
        for guess, channel in zip(guesses, channels, strict=True):
            guess.cancel()
            await channel.close()


# ----------------------------------------------------------------------------- shares, and writes


async def test_shares_go_by_principal_whatever_a_client_calls_itself(tokens: Tokens) -> None:
    backend = ScriptedBackend()
    release = asyncio.Event()

    async def hold() -> None:
        await release.wait()

    backend.before["truncate"] = hold
    ann, bob = tokens.add("ann", "t-ann"), tokens.add("bob", "t-bob")
    options = replace(CACHED, limits=Limits(inflight_max=8))
    async with served(backend, options, tokens=TokenFile(tokens.path)) as server:

        def client(token: Path, name: str) -> RpcConsensus:
            once = RpcOptions(write_s=1, read_s=1)
            return RpcConsensus(f"{server.url}?token_file={token}", once, client_id=name)

        stores = [client(ann, f"name-{n}") for n in range(3)] + [client(bob, "bob")]
        running = [asyncio.create_task(s.truncate("k", 0)) for s in stores[:2]]
        await eventually(lambda: backend.calls["truncate"] == 2)
        with pytest.raises(Determinate) as caught:  # a quarter of eight is two
            await stores[2].compare_and_set("k", V(0, b""))
        assert caught.value.kind is ErrorKind.OVERLOADED
        assert await stores[3].compare_and_set("k", V(0, b"")) is COMMITTED
        release.set()
        await asyncio.gather(*running, return_exceptions=True)
        for store in stores:
            await store.close()


async def test_the_log_names_the_principal_of_each_write(
    tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "penstock.consensus")
    token = tokens.add("ann", "t-ann")
    async with served(MemoryBackend(), tokens=TokenFile(tokens.path)) as server:
        store = RpcConsensus(f"{server.url}?token_file={token}", client_id="claims-to-be-bob")
        await store.compare_and_set("a", V(0, b""))
        await store.compare_and_set("a", V(0, b""))
        await store.compare_and_set_all([("b", V(0, b"")), ("c", V(0, b""))])
        await store.truncate("a", 0)
        server.committer.writes.report()
        server.committer.writes.report()  # nothing new
        await store.close()
    noted = [r.__dict__["fields"] for r in caplog.records if r.message == "write"]
    assert {each["principal"] for each in noted} == {"ann"}
    assert [(each["op"], each["shards"]) for each in noted] == [
        ("cas", "a"), ("cas", "a"), ("cas_all", "b,c"), ("truncate", "a"),
    ]  # fmt: skip
    [summary] = [r.__dict__["fields"] for r in caplog.records if r.message == "writes"]
    assert summary == {"principal": "ann", "committed": 2, "mismatch": 1, "truncated": 1}
    assert (
        "Received connection from: 127.0.0.1 principal=ann client=claims-to-be-bob" in caplog.text
    )
