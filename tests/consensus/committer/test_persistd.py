"""The daemon as a process: how it starts, waits, heals, stops and dies."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from contextlib import aclosing
from pathlib import Path

import psycopg
import pytest

from consensus.committer import clients
from consensus.committer.daemon import get, running_persistd
from consensus.committer.scripted import COMMITTED, V, eventually
from fix_postgres import PostgresServer
from penstock.consensus.committer.client import RpcConsensus, RpcOptions
from penstock.consensus.store import (
    ConsensusError,
    Determinate,
    Entries,
    ErrorKind,
    Indeterminate,
)
from penstock.testing.postgres import free_port
from servicekit.rpc.certificates import certificate

CLIENT_PROCESSES, CLIENTS_EACH, ROUNDS = 4, 16, 25


def sqlite(directory: Path) -> str:
    return f"sqlite:///{directory}/consensus.db"


@pytest.mark.postgres
async def test_many_clients_share_few_connections_and_lose_nothing(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    url = postgres.create_database()
    with running_persistd(tmp_path, url) as daemon:
        processes = [
            await asyncio.create_subprocess_exec(
                sys.executable,
                clients.__file__,
                daemon.url,
                f"p{n}",
                str(CLIENTS_EACH),
                str(ROUNDS),
            )
            for n in range(CLIENT_PROCESSES)
        ]
        running = asyncio.gather(*[process.wait() for process in processes])
        most = 0
        with psycopg.connect(postgres.url(), autocommit=True) as admin:
            while not running.done():
                row = admin.execute(
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = %s",
                    (url.rpartition("/")[2],),
                ).fetchone()
                most = max(most, row[0] if row else 0)
                await asyncio.sleep(0.02)
        assert await running == [0] * CLIENT_PROCESSES
        assert 1 <= most <= 8
        store = RpcConsensus(daemon.url)
        for process in range(CLIENT_PROCESSES):
            for client in range(CLIENTS_EACH):
                key = f"p{process}/{client}"
                want = [V(n, f"{key}#{n}".encode()) for n in range(ROUNDS)]
                assert await store.scan(key, 0) == want
        await store.close()
        status, page = daemon.get("/metrics")
        assert status == 200
        total = CLIENT_PROCESSES * CLIENTS_EACH * ROUNDS
        assert f'penstock_persist_rpc_total{{op="cas",result="committed"}} {total}.0' in page
        assert 'penstock_persist_pool_connections{state="open"}' in page
        assert daemon.terminate() == 0


@pytest.mark.postgres
async def test_it_waits_for_its_database_and_says_so(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    """Not an exit that races the supervisor, and no silence that looks like a hang."""
    own_postgres.stop()
    admin = free_port()
    url = own_postgres.url()
    with running_persistd(tmp_path, url, "--admin-port", str(admin)) as daemon:
        daemon.wait_for("waiting for consensus backend")
        daemon.wait_for("attempt=5")
        assert get(f"http://127.0.0.1:{admin}/healthz")[0] == 200
        status, why = get(f"http://127.0.0.1:{admin}/readyz")
        assert (status, why) == (503, "waiting for the consensus backend\n")
        assert daemon.process.poll() is None
        own_postgres.start()
        store = RpcConsensus(daemon.url)
        assert await store.compare_and_set("k", V(0, b"")) is COMMITTED
        await store.close()
        assert daemon.get("/readyz") == (200, "ready\n")
        log = daemon.log
        order = [
            "persistd starting",
            "waiting for consensus",
            "backend ready",
            "persistd listening",
        ]
        assert [log.index(event) for event in order] == sorted(log.index(event) for event in order)
        assert "penstock:<redacted>@127.0.0.1" in log
        assert ":penstock@" not in log
        assert daemon.terminate() == 0


async def test_told_to_stop_while_waiting_it_stops(tmp_path: Path) -> None:
    url = f"postgresql://u:pw@127.0.0.1:{free_port()}/x"
    with running_persistd(tmp_path, url) as daemon:
        daemon.wait_for("waiting for consensus backend")
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.log


@pytest.mark.postgres
async def test_a_vanished_schema_is_healed_once_and_resets_clients_that_knew_it(
    postgres_url: str, tmp_path: Path
) -> None:
    """In place, under load; old clients stop, new ones start from nothing."""
    with running_persistd(tmp_path, postgres_url) as daemon:
        old = RpcConsensus(daemon.url)
        for n in range(5):
            assert await old.compare_and_set("k", V(n, b"")) is COMMITTED
        tailing = asyncio.create_task(_until_error(old))
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as admin:
            await admin.execute("DROP SCHEMA penstock CASCADE")
        outcomes = await asyncio.gather(
            *[old.compare_and_set(f"x/{n}", V(0, b"")) for n in range(50)], return_exceptions=True
        )
        assert all(isinstance(o, Determinate) and o.kind is ErrorKind.STORE_RESET for o in outcomes)
        assert await tailing is ErrorKind.STORE_RESET
        with pytest.raises(Determinate) as caught:
            await old.head("k")
        assert caught.value.kind is ErrorKind.STORE_RESET
        new = RpcConsensus(daemon.url)
        assert await new.head("k") is None
        assert await new.compare_and_set("k", V(0, b"again")) is COMMITTED
        assert daemon.log.count("consensus schema was missing; recreated") == 1
        assert "penstock_persist_backend_heals_total 1.0" in daemon.get("/metrics")[1]
        assert daemon.get("/readyz")[0] == 200
        await old.close()
        await new.close()


async def _until_error(store: RpcConsensus) -> ErrorKind:
    try:
        async with aclosing(store.watch("", 0)) as events:
            async for _ in events:
                pass
    except ConsensusError as error:
        return error.kind
    raise AssertionError("a watch has no end")


@pytest.mark.postgres
async def test_told_not_to_heal_it_exits_with_3_and_without_a_traceback(
    postgres_url: str, tmp_path: Path
) -> None:
    with running_persistd(tmp_path, postgres_url, "--no-self-heal") as daemon:
        store = RpcConsensus(daemon.url, RpcOptions(read_s=5))
        assert await store.head("k") is None
        async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as admin:
            await admin.execute("DROP SCHEMA penstock CASCADE")
        with pytest.raises(ConsensusError) as caught:
            await store.head("k", fresh=True)
        assert "42P01" in caught.value.message
        assert await asyncio.to_thread(daemon.process.wait, 30) == 3
        assert "Traceback" not in daemon.log
        assert "the consensus store is gone" in daemon.log
        await store.close()


async def test_a_graceful_stop_loses_no_answer(tmp_path: Path) -> None:
    with running_persistd(tmp_path, sqlite(tmp_path)) as daemon:
        stores = [RpcConsensus(daemon.url) for _ in range(4)]
        committed: dict[str, int] = {}
        first = asyncio.Event()

        async def write(store: RpcConsensus, key: str) -> ConsensusError:
            for n in range(100_000):
                try:
                    assert await store.compare_and_set(key, V(n, b"")) is COMMITTED
                except ConsensusError as error:
                    return error
                committed[key] = n
                first.set()
            raise AssertionError("the daemon never stopped")

        writers = [
            asyncio.create_task(write(store, f"{i}/{j}"))
            for i, store in enumerate(stores)
            for j in range(8)
        ]
        await first.wait()
        assert await asyncio.to_thread(daemon.terminate) == 0
        await asyncio.gather(*writers)
        for store in stores:
            await store.close()
        assert "persistd stopped" in daemon.log
        assert "Traceback" not in daemon.log
    with running_persistd(tmp_path, sqlite(tmp_path)) as daemon:
        store = RpcConsensus(daemon.url)
        for key, seqno in committed.items():
            head = await store.head(key, fresh=True)
            assert head is not None
            assert head.seqno >= seqno
        await store.close()


async def test_a_watch_survives_kill_9_without_gap_or_repetition(tmp_path: Path) -> None:
    port = str(free_port())
    keys = [f"k/{n}" for n in range(8)]
    total = 60
    landed: dict[str, int] = {}

    async def write(store: RpcConsensus, key: str) -> None:
        """As a state log does: an unknown outcome is looked up, and only then resent."""
        seqno = 0
        while seqno < total:
            try:
                await store.compare_and_set(key, V(seqno, b"%d" % seqno))
                head = await store.head(key, fresh=True)
            except ConsensusError:
                continue
            seqno = 0 if head is None else head.seqno + 1
            landed[key] = seqno

    async def watch(store: RpcConsensus) -> list[tuple[int, str, int]]:
        seen: list[tuple[int, str, int]] = []
        async with aclosing(store.watch("k/", 0)) as events:
            async for event in events:
                if isinstance(event, Entries):
                    seen += [(event.revision, key, e.seqno) for key, e in event.entries]
                if len(seen) >= total * len(keys):
                    return seen
        raise AssertionError("a watch has no end")

    store = RpcConsensus(f"grpc://127.0.0.1:{port}", RpcOptions(write_s=5, read_s=5))
    watching = asyncio.create_task(watch(store))
    writing = asyncio.gather(*[write(store, key) for key in keys])
    for kills in range(1, 4):
        flags = ("--listen", f"127.0.0.1:{port}")
        with running_persistd(tmp_path, sqlite(tmp_path), *flags) as daemon:
            goal = kills * len(keys) * total / 4
            await eventually(lambda goal=goal: sum(landed.values()) >= goal)
            daemon.kill()
    with running_persistd(tmp_path, sqlite(tmp_path), "--listen", f"127.0.0.1:{port}"):
        async with asyncio.timeout(60):
            await writing
            seen = await watching
        await store.close()
    revisions = [revision for revision, _, _ in seen]
    assert revisions == sorted(revisions)
    for key in keys:
        assert [seqno for _, k, seqno in seen if k == key] == list(range(total))


async def test_stats_are_logged_without_prometheus(tmp_path: Path) -> None:
    flags = ("--stats-heartbeat-interval", "100ms", "--cache", "--log-json")
    with running_persistd(tmp_path, sqlite(tmp_path), *flags) as daemon:
        store = RpcConsensus(daemon.url)
        assert await store.compare_and_set("k", V(0, b"")) is COMMITTED
        daemon.wait_for('"cas_committed": 1')
        assert '"event": "stats"' in daemon.log
        await store.close()


async def test_a_port_that_is_taken_is_not_shared(tmp_path: Path) -> None:
    with running_persistd(tmp_path, sqlite(tmp_path)) as first:
        listen = first.address[0]
        with running_persistd(tmp_path, sqlite(tmp_path), "--listen", listen) as second:
            assert await asyncio.to_thread(second.process.wait, 60) == 1
            assert f"cannot listen on {listen}" in second.log
            assert "Traceback" not in second.log


# --------------------------------------------------------------------------------------------- TLS


async def test_tls_with_client_certificates_and_tokens(tmp_path: Path) -> None:
    ca, _ = certificate(tmp_path, "ca")
    cert, key = certificate(tmp_path, "server", "ca")
    own, own_key = certificate(tmp_path, "client", "ca")
    stranger, stranger_key = certificate(tmp_path, "stranger")
    tokens, token = tmp_path / "tokens", tmp_path / "token"
    tokens.write_text(f"me writer * {hashlib.sha256(b'sesame').hexdigest()}\n")
    token.write_text("sesame")
    flags = (
        "--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(ca),
        "--token-file", str(tokens), "--listen", "0.0.0.0:0",
    )  # fmt: skip
    quick = RpcOptions(write_s=1.5, read_s=1.5)
    with running_persistd(tmp_path, sqlite(tmp_path), *flags) as daemon:
        port = daemon.address[0].rpartition(":")[2]
        base = f"grpc://127.0.0.1:{port}"
        good = RpcConsensus(f"{base}?ca={ca}&cert={own}&key={own_key}&token_file={token}")
        assert await good.compare_and_set("k", V(0, b"")) is COMMITTED
        for options in ("", f"?ca={ca}", f"?ca={ca}&cert={stranger}&key={stranger_key}"):
            bad = RpcConsensus(base + options, quick)
            with pytest.raises(ConsensusError) as caught:
                await bad.compare_and_set("k", V(1, b""))
            assert not isinstance(caught.value, Indeterminate)
            await bad.close()
        no_token = RpcConsensus(f"{base}?ca={ca}&cert={own}&key={own_key}", quick)
        with pytest.raises(Determinate) as refused:
            await no_token.compare_and_set("k", V(1, b""))
        assert refused.value.kind is ErrorKind.UNAUTHENTICATED
        certificate(tmp_path, "server", "ca")  # renewed on disk, in use from the next handshake on
        renewed = RpcConsensus(f"{base}?ca={ca}&cert={own}&key={own_key}&token_file={token}")
        assert await renewed.head("k") == V(0, b"")
        daemon.wait_for("certificates reloaded")
        assert "sesame" not in daemon.log
        for store in (good, no_token, renewed):
            await store.close()
