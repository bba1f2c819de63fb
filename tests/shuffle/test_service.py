"""Sessions over gRPC, on loopback: the same answers, the same errors, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from consensus.committer.scripted import eventually
from journal.publishing import World, world
from penstock.errors import Bug, PenstockError, Unavailable, UsageError, UserError
from penstock.journal.committed import VisibleRows
from penstock.journal.state import Blob, Fragment, Inline
from penstock.model.clock import Clock, Flag, Producer
from penstock.model.frontier import Frontier
from penstock.model.runs import Run
from penstock.model.sequence import SequenceError
from penstock.servicekit.rpc.listener import server_credentials
from penstock.servicekit.rpc.tokens import TokenFile
from penstock.shuffle import service as module
from penstock.shuffle import wire
from penstock.shuffle.binding import Binding
from penstock.shuffle.client import RemoteSession
from penstock.shuffle.delivery import Checkpoint, Delivery
from penstock.shuffle.proto import shuffle_pb2 as pb
from penstock.shuffle.service import ShuffleService, serving
from penstock.shuffle.session import SessionClosed
from servicekit.rpc.certificates import certificate
from shuffle.following import (
    BOTH,
    NOW,
    Coordinator,
    append_ack,
    append_rows,
    documents,
    ids,
    planner,
    session,
    torn,
    write,
)
from support.strategies_frontier import frontiers

PAID = "acme/payments/pivot=00"
P1 = Producer(Producer.MULTICAST | 1)


async def resolve(name: str) -> Sequence[Binding]:
    if name == "acme/both":
        return BOTH
    if name == "acme/broken":
        raise RuntimeError("postgres://user:hunter2@host")
    raise UserError(f"there is no task or collection {name}", fix="did you mean acme/both?")


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as made:
        yield made


@asynccontextmanager
async def served(here: World, **options: Any) -> AsyncIterator[tuple[ShuffleService, str]]:  # noqa: ANN401
    service = ShuffleService(planner(here), resolve, now=lambda: NOW, **options)
    async with serving(service) as address:
        yield service, address


def stream(channel: aio.Channel) -> aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]:
    """A session of a client that does as it likes."""
    method = channel.stream_stream(
        wire.SESSION,
        request_serializer=pb.SessionRequest.SerializeToString,
        response_deserializer=pb.SessionResponse.FromString,
    )
    return method()


@asynccontextmanager
async def remote(
    address: str,
    name: str = "acme/both",
    **options: Any,  # noqa: ANN401 - those of `open`
) -> AsyncIterator[RemoteSession]:
    opened = await RemoteSession.open(address, name, **options)
    try:
        yield opened
    finally:
        await opened.close()


async def none_open(service: ShuffleService) -> None:
    await eventually(lambda: not service.sessions)


# ---------------------------------------------------------------------------------------- sessions


async def test_another_process_gets_what_a_session_here_gets(here: World) -> None:
    reader = Coordinator(here)
    async with served(here) as (_, address), remote(address) as reading:
        assert [(each.index, each.collection) for each in reading.bindings] == [
            (0, "acme/orders"),
            (1, "acme/payments"),
        ]
        await write(here, 1, 2, 3)
        await write(here, 4, text="x" * 20_000)
        await reader.everything(reading)
    near = Coordinator(here)
    async with session(here) as reading_here:
        await near.everything(reading_here)
    assert ids(reader.taken, 0) == ids(reader.taken, 1) == [1, 2, 3, 4]
    assert sorted(near.taken) == sorted(reader.taken)
    assert near.committed.without_bytes() == reader.committed.without_bytes()


async def test_it_resumes_recovers_and_peeks(here: World) -> None:
    await write(here, 1)
    reader = Coordinator(here)
    async with served(here) as (_, address):
        async with remote(address) as reading:
            await reader.transaction(reading)
            missing = await torn(here, 2, 3, 4, acknowledged=2)
            assert (peek := await reading.next_checkpoint()).is_peek
            for parts in missing:
                await here.journals.append_all(parts)
            assert await documents(here, peek)
        async with remote(address, resume=reader.committed) as reading:
            prepared = await reader.prepare(reading)
        await write(here, 5)
        async with remote(address, resume=reader.recovery) as reading:
            assert await reader.prepare(reading) == prepared
        reader.commit()
        async with remote(address, resume=reader.committed) as reading:
            assert ids(await reader.transaction(reading), 0) == [5]


async def test_large_openings_and_answers_come_in_small_messages(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    parts = wire.checkpoint_parts

    def small(number: int, checkpoint: Checkpoint) -> Any:  # noqa: ANN401
        for part in parts(number, checkpoint, 2000):
            sizes.append(part.ByteSize())
            yield part

    requests = wire.open_requests
    monkeypatch.setattr(wire, "checkpoint_parts", small)
    monkeypatch.setattr(wire, "open_requests", lambda *a: requests(*a, 50))
    for n in range(40):
        await write(here, *range(n * 10, n * 10 + 10))
    reader = Coordinator(here)
    async with served(here) as (_, address):
        async with remote(address) as reading:
            await reader.everything(reading)
        assert ids(reader.taken, 0) == ids(reader.taken, 1) == list(range(400))
        assert len(sizes) > 10
        assert max(sizes) < 2000 + 4096 + 1000
        await write(here, 400)
        async with remote(address, resume=reader.committed) as reading:
            assert ids(await reader.transaction(reading), 0) == [400]


async def test_several_sessions_do_not_disturb_each_other(here: World) -> None:
    async with served(here) as (service, address):
        async with remote(address) as lazy, remote(address) as busy, remote(address) as other:
            readers = [Coordinator(here) for _ in range(2)]
            for n in range(5):
                await write(here, n)
                await asyncio.gather(readers[0].transaction(busy), readers[1].transaction(other))
            assert service.sessions == 3
            for reader in readers:
                assert ids(reader.taken, 0) == ids(reader.taken, 1) == list(range(5))
            late = Coordinator(here)
            await late.everything(lazy)
            assert ids(late.taken, 0) == list(range(5))
        await none_open(service)


async def test_a_client_that_does_not_read_holds_back_nobody_else(here: World) -> None:
    for n in range(30):
        await write(here, *range(n * 10, n * 10 + 10), text="x" * 3000)
    async with (
        served(here) as (service, address),
        aio.insecure_channel(address.removeprefix("grpc://")) as channel,
    ):
        deaf = stream(channel)
        await deaf.write(pb.SessionRequest(open=pb.Open(name="acme/both", shards=1)))
        await deaf.write(pb.SessionRequest(next_checkpoint=pb.NextCheckpoint()))
        reader = Coordinator(here)
        async with remote(address) as reading:
            await reader.everything(reading)
        assert ids(reader.taken, 0) == list(range(300))
        deaf.cancel()
        await none_open(service)


async def test_who_waits_is_told_what_for(here: World) -> None:
    async with served(here, waiting_s=0.01) as (_, address), remote(address) as reading:
        asked = asyncio.create_task(reading.next_checkpoint())
        await eventually(lambda: "Nothing new is committed" in reading.waiting_for())
        await write(here, 1)
        assert (await asked).deliveries


async def test_a_call_that_is_cancelled_loses_nothing(here: World) -> None:
    reader = Coordinator(here)
    async with served(here) as (_, address), remote(address) as reading:
        asked = asyncio.create_task(reading.next_checkpoint())
        await asyncio.sleep(0.05)
        asked.cancel()
        await asyncio.wait([asked])
        await write(here, 1)
        assert ids(await reader.transaction(reading), 0) == [1]


# -------------------------------------------------------------------------------------- their ends


async def test_closing_ends_the_session_on_both_sides(here: World) -> None:
    before = asyncio.all_tasks()
    async with served(here) as (service, address), remote(address) as reading:
        asked = asyncio.create_task(reading.next_checkpoint())
        await asyncio.sleep(0.05)
        assert service.sessions == 1
        await reading.close()
        await none_open(service)
        with pytest.raises(SessionClosed):
            await asked
        await reading.close()
    left = asyncio.all_tasks() - before - {asked}
    assert not [task for task in left if "session" in task.get_name()]


CLIENT = """
import asyncio, sys
from penstock.shuffle.client import RemoteSession

async def main():
    reading = await RemoteSession.open(sys.argv[1], "acme/both")
    print("open", flush=True)
    await reading.next_checkpoint()

asyncio.run(main())
"""


async def test_a_client_that_vanishes_takes_its_session_with_it(here: World) -> None:
    async with served(here) as (service, address):
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, address, stdout=asyncio.subprocess.PIPE
        )
        assert client.stdout is not None
        assert await client.stdout.readline() == b"open\n"
        assert service.sessions == 1
        client.kill()
        await client.wait()
        await none_open(service)


async def test_who_closes_the_connection_under_a_session_ends_it(here: World) -> None:
    async with served(here) as (service, address):
        reading = await RemoteSession.open(address, "acme/both")
        asked = asyncio.create_task(reading.next_checkpoint())
        await reading._channel.close(None)
        with pytest.raises(PenstockError):
            await asked
        await none_open(service)
        await reading.close()


async def test_a_service_that_stops_ends_its_sessions(here: World) -> None:
    async with served(here) as (service, address):
        reading = await RemoteSession.open(address, "acme/both")
        asked = asyncio.create_task(reading.next_checkpoint())
        await asyncio.sleep(0.05)
    assert service.sessions == 0
    with pytest.raises(Unavailable) as caught:
        await asked
    assert "frontier" in (caught.value.fix or "")
    await reading.close()


async def test_nobody_listening_is_told_as_such() -> None:
    with pytest.raises(Unavailable, match="no connection to the shuffle service") as caught:
        await RemoteSession.open("grpc://127.0.0.1:1", "acme/both")
    assert caught.value.where == "grpc://127.0.0.1:1"
    assert "see that it runs there" in (caught.value.fix or "")


async def test_another_service_at_the_address_is_told_as_such() -> None:
    server = aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with pytest.raises(UserError, match="no shuffle service"):
            await RemoteSession.open(f"grpc://127.0.0.1:{port}", "acme/both")
    finally:
        await server.stop(None)


# ------------------------------------------------------------------------------------------ errors


async def test_errors_arrive_as_what_where_why_and_fix(here: World) -> None:
    async with served(here) as (service, address):
        with pytest.raises(UserError, match="no task or collection acme/bth") as caught:
            await RemoteSession.open(address, "acme/bth")
        assert caught.value.fix == "did you mean acme/both?"
        with pytest.raises(Bug, match="RuntimeError") as unexpected:
            await RemoteSession.open(address, "acme/broken")
        assert "hunter2" not in str(unexpected.value)
        await write(here, 1)
        reader = Coordinator(here)
        async with remote(address) as reading:
            await reader.transaction(reading)
            await append_rows(here, PAID, P1, [100, 110], Flag.CONTINUE_TXN)
            await append_ack(here, PAID, P1, 105)
            for _ in range(2):
                with pytest.raises(SequenceError, match=PAID):
                    await reading.next_checkpoint()
        await none_open(service)


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        pytest.param([pb.SessionRequest()], "a session begins with", id="nothing"),
        pytest.param(
            [pb.SessionRequest(next_checkpoint=pb.NextCheckpoint())],
            "a session begins with",
            id="a request before opening",
        ),
        pytest.param(
            [pb.SessionRequest(open=pb.Open(name="acme/both", shards=1, resume=b"PSF?"))],
            "this is no frontier",
            id="a frontier that is none",
        ),
        pytest.param(
            [pb.SessionRequest(open=pb.Open(name="acme/both", shards=1))] * 2,
            "open was sent to an open session",
            id="opened twice",
        ),
        pytest.param(
            [
                pb.SessionRequest(open=pb.Open(name="acme/both", shards=1)),
                *[pb.SessionRequest(next_checkpoint=pb.NextCheckpoint())] * 2,
            ],
            "while another call waits",
            id="asked twice",
        ),
        pytest.param(
            [pb.SessionRequest(open=pb.Open(name="x" * 600_000, shards=1))],
            "is no name of a task",
            id="a name that is none",
        ),
        pytest.param(
            [pb.SessionRequest(open=pb.Open(name="acme/\0", shards=1))],
            "is no name of a task",
            id="a name with NUL",
        ),
        pytest.param(
            [
                pb.SessionRequest(open=pb.Open(name="acme/both", shards=1)),
                pb.SessionRequest(caught_up=pb.CaughtUp(revision=2**64 - 1)),
            ],
            "outside 0 … 2^63-1",
            id="a revision that is none",
        ),
        pytest.param(
            [
                pb.SessionRequest(open=pb.Open(name="acme/both", shards=1)),
                *[pb.SessionRequest(caught_up=pb.CaughtUp(revision=2**40))] * 65,
            ],
            "64 is the limit",
            id="too many waits",
        ),
    ],
)
async def test_a_client_that_does_not_keep_to_the_protocol_is_told(
    here: World, messages: list[pb.SessionRequest], what: str
) -> None:
    async with (
        served(here) as (service, address),
        aio.insecure_channel(address.removeprefix("grpc://")) as channel,
    ):
        call = stream(channel)
        for message in messages:
            await call.write(message)
        while not (response := await call.read()).HasField("failure"):
            pass
        assert what in response.failure.what
        await none_open(service)


def test_every_error_keeps_its_kind_and_no_secret() -> None:
    error = Unavailable("lost postgres://me:hunter2@host", where="w", why="y", fix="f")
    message = wire.encode_failure(error)
    assert "hunter2" not in message.what
    back = wire.decode_failure(message)
    assert (type(back), back.where, back.why, back.fix) == (Unavailable, "w", "y", "f")
    unknown = wire.decode_failure(pb.Failure(kind="OfANewerRelease", what="w"))
    assert (type(unknown), unknown.where) == (PenstockError, None)


# ------------------------------------------------------------------------------------ who may what


def tokens(directory: Path, prefix: str) -> tuple[TokenFile, Path]:
    secret = directory / "token"
    secret.write_text("open sesame\n")
    digest = hashlib.sha256(b"open sesame").hexdigest()
    file = directory / "tokens"
    file.write_text(f"ada reader {prefix} {digest}\n")
    return TokenFile(file), secret


async def test_a_token_opens_the_collections_it_is_for(here: World, tmp_path: Path) -> None:
    known, secret = tokens(tmp_path, "*")
    async with served(here, tokens=known) as (_, address):
        with pytest.raises(UserError, match="refused the connection") as caught:
            await RemoteSession.open(address, "acme/both")
        assert "token_file" in (caught.value.fix or "")
        async with remote(f"{address}?token_file={secret}") as reading:
            assert reading.bindings
    limited, _ = tokens(tmp_path, "journal/acme/orders/")
    async with served(here, tokens=limited) as (_, address):
        with pytest.raises(UserError, match="ada may not read acme/payments"):
            await RemoteSession.open(f"{address}?token_file={secret}", "acme/both")


async def test_a_revoked_token_ends_its_session(here: World, tmp_path: Path) -> None:
    known, secret = tokens(tmp_path, "*")
    async with served(here, tokens=known) as (service, address):
        session = await RemoteSession.open(f"{address}?token_file={secret}", "acme/both")
        waiting = asyncio.create_task(session.next_checkpoint())
        await asyncio.sleep(0)
        (tmp_path / "tokens").write_text(f"bob reader * {'0' * 64}\n")
        with pytest.raises(Unavailable, match="connection to the shuffle service is lost") as lost:
            async with asyncio.timeout(20):
                await waiting
        assert "not in force any more" in (lost.value.why or "")
        await none_open(service)
        await session.close()
        with pytest.raises(UserError, match="refused the connection"):
            await RemoteSession.open(f"{address}?token_file={secret}", "acme/both")


async def test_sessions_are_served_on_a_unix_socket(here: World, tmp_path: Path) -> None:
    await write(here, 1, 2)
    service = ShuffleService(planner(here), resolve, now=lambda: NOW)
    async with serving(service, listen=f"unix:{tmp_path}/run/s.sock") as address:
        assert address == f"grpc+unix://{tmp_path}/run/s.sock"
        reader = Coordinator(here)
        async with remote(address) as reading:
            await reader.everything(reading)
        assert ids(reader.taken, 0) == [1, 2]


async def test_other_hosts_are_served_with_tls_and_tokens_only(here: World, tmp_path: Path) -> None:
    known, _ = tokens(tmp_path, "*")
    for options in ({}, {"tokens": known}):
        service = ShuffleService(planner(here), resolve, now=lambda: NOW, **options)
        with pytest.raises(UsageError, match="without both TLS and tokens"):
            async with serving(service, listen="0.0.0.0:0"):
                pass


async def test_other_hosts_read_over_tls_with_a_token(here: World, tmp_path: Path) -> None:
    ca, _ = certificate(tmp_path, "ca")
    cert, key = certificate(tmp_path, "server", "ca")
    stranger, _ = certificate(tmp_path, "stranger")
    known, secret = tokens(tmp_path, "*")
    wrong = tmp_path / "wrong"
    wrong.write_text("open barley\n")
    await write(here, 1, 2)
    service = ShuffleService(planner(here), resolve, now=lambda: NOW, tokens=known)
    credentials = server_credentials(cert, key, None)
    async with serving(service, listen="0.0.0.0:0", credentials=credentials) as listening:
        address = f"grpc://127.0.0.1:{listening.rpartition(':')[2]}"
        reader = Coordinator(here)
        async with remote(f"{address}?ca={ca}&token_file={secret}") as reading:
            await reader.everything(reading)
        assert ids(reader.taken, 0) == [1, 2]
        for options, why in (
            (f"?ca={ca}", "a token is required"),
            (f"?ca={ca}&token_file={wrong}", "the token is not valid"),
        ):
            with pytest.raises(UserError, match="refused the connection") as refused:
                await RemoteSession.open(address + options, "acme/both")
            assert refused.value.why == why
            assert "barley" not in str(refused.value)
        for options in ("", f"?token_file={secret}", f"?ca={stranger}&token_file={secret}"):
            with pytest.raises(Unavailable, match="no connection to the shuffle service") as lost:
                await RemoteSession.open(address + options, "acme/both")
            assert "authority of its certificate" in (lost.value.fix or "")
        assert service.sessions == 0


async def test_a_full_service_says_so(here: World) -> None:
    async with served(here, sessions_max=1) as (_, address), remote(address):
        with pytest.raises(Unavailable, match="full"):
            await RemoteSession.open(address, "acme/both")


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED])
async def test_a_refusal_is_told_however_fast_it_comes(
    code: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC forgets the status of a stream on which a message could not be sent any more."""

    def refuse(_: object, context: grpc.ServicerContext) -> None:
        context.abort(code, "not you")

    method = grpc.stream_stream_rpc_method_handler(refuse)
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(wire.SERVICE, {"Session": method})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    get = asyncio.Queue.get

    async def too_late(queue: asyncio.Queue[object]) -> object:
        time.sleep(0.02)  # noqa: ASYNC251 - the refusal comes, and the loop does not know
        return await get(queue)

    monkeypatch.setattr(asyncio.Queue, "get", too_late)
    try:
        for _ in range(20):
            with pytest.raises(UserError) as refused:
                await RemoteSession.open(f"grpc://127.0.0.1:{port}", "acme/both")
            assert refused.value.why == "not you"
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([pb.SessionRequest()], id="between two reads"),
        pytest.param(
            [
                pb.SessionRequest(open=pb.Open(name="acme/both", shards=1)),
                *[pb.SessionRequest(next_checkpoint=pb.NextCheckpoint())] * 2,
            ],
            id="while reading",
        ),
    ],
)
async def test_a_stream_stays_after_a_failure_until_the_client_ends_it(
    here: World, messages: list[pb.SessionRequest]
) -> None:
    async with (
        served(here) as (service, address),
        aio.insecure_channel(address.removeprefix("grpc://")) as channel,
    ):
        call = stream(channel)
        for message in messages:
            await call.write(message)
        while not (await call.read()).HasField("failure"):
            pass
        await none_open(service)
        for _ in range(10):
            await call.write(pb.SessionRequest(next_checkpoint=pb.NextCheckpoint()))
        assert not call.done()
        await call.done_writing()
        assert await call.read() is aio.EOF


async def test_a_message_that_is_none_is_told_as_such(
    here: World, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        served(here) as (service, address),
        aio.insecure_channel(address.removeprefix("grpc://")) as channel,
    ):
        for opening in ([], [pb.SessionRequest(open=pb.Open(name="acme/both", shards=1))]):
            call = channel.stream_stream(
                wire.SESSION, response_deserializer=pb.SessionResponse.FromString
            )()
            for message in opening:
                await call.write(message.SerializeToString())
            for _ in range(2):  # and another one to whoever lingers
                await call.write(b"\xff\xff\xff\xff")
            while not (response := await call.read()).HasField("failure"):
                pass
            assert "none of this protocol" in response.failure.what
            await call.done_writing()
            assert await call.read() is aio.EOF
        await none_open(service)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_session_that_is_not_opened_gives_its_place_back(here: World) -> None:
    async with (
        served(here, opening_s=0.05) as (service, address),
        aio.insecure_channel(address.removeprefix("grpc://")) as channel,
    ):
        silent, half = stream(channel), stream(channel)
        await half.write(pb.SessionRequest(open=pb.Open(name="acme/both", shards=1, more=True)))
        for call in (silent, half):
            await call.wait_for_connection()
            response = await call.read()
            assert "was not opened within 0.05 s" in response.failure.what
        await none_open(service)


async def test_frontiers_that_arrive_are_bounded_together(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RESUME_BYTES_MAX", 1_000)
    async with (
        served(here) as (service, address),
        aio.insecure_channel(address.removeprefix("grpc://")) as channel,
    ):
        part = pb.Open(name="acme/both", shards=1, resume=bytes(600), more=True)
        first, second = stream(channel), stream(channel)
        await first.write(pb.SessionRequest(open=part))
        await eventually(lambda: service._resuming == 600)
        await second.write(pb.SessionRequest(open=part))
        response = await second.read()
        assert response.failure.kind == "Unavailable"
        assert "1000 is the limit" in response.failure.why
        first.cancel()
        await eventually(lambda: service._resuming == 0)
        await none_open(service)


async def test_a_message_to_the_service_has_a_limit_that_is_named(here: World) -> None:
    async with (
        served(here) as (service, address),
        aio.insecure_channel(
            address.removeprefix("grpc://"), options=[("grpc.max_send_message_length", -1)]
        ) as channel,
    ):
        call = stream(channel)
        opening = pb.Open(name="acme/both", shards=1, resume=bytes(100 << 20))
        with contextlib.suppress(aio.AioRpcError):
            await call.write(pb.SessionRequest(open=opening))
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1048576" in await call.details()
        packed = channel.stream_stream(wire.SESSION)(compression=grpc.Compression.Gzip)
        with contextlib.suppress(aio.AioRpcError):
            await packed.write(bytes(100))
        # A client that could not send any more may forget the status it was refused with, and
        # report INTERNAL (grpc/grpc#36066). It was refused either way.
        refused = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)
        assert await packed.code() in refused
        await none_open(service)


async def test_a_client_that_never_reads_ends_its_session(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its place, and one checkpoint, however often it asks; not for ever."""

    def large(number: int, _: Checkpoint) -> Iterator[pb.CheckpointPart]:
        for _ in range(1_000):
            yield pb.CheckpointPart(checkpoint=number, frontier=bytes(100_000), more=True)

    monkeypatch.setattr(wire, "checkpoint_parts", large)
    await write(here, 1)
    async with (
        served(here, slow_s=0.3) as (service, address),
        aio.insecure_channel(address.removeprefix("grpc://")) as channel,
    ):
        call = stream(channel)
        await call.write(pb.SessionRequest(open=pb.Open(name="acme/both", shards=1)))
        assert (await call.read()).HasField("opened")
        await call.write(pb.SessionRequest(next_checkpoint=pb.NextCheckpoint()))
        await eventually(lambda: service.sessions == 0)


async def test_a_stream_does_not_stay_forever(here: World) -> None:
    async with (
        served(here, linger_s=0.05) as (_, address),
        aio.insecure_channel(address.removeprefix("grpc://")) as channel,
    ):
        call = stream(channel)
        await call.write(pb.SessionRequest())
        assert [each.HasField("failure") async for each in call] == [True]


# -------------------------------------------------------------------------------------------- wire


def deliveries() -> st.SearchStrategy[list[Delivery]]:
    def run(first: int, rows: int, producer: int) -> Run:
        return Run(
            producer=Producer(Producer.MULTICAST | producer),
            kind=Flag.CONTINUE_TXN,
            first_offset=first,
            last_offset=first + rows - 1,
            rows=rows,
            clock_min=Clock(100 + first),
            clock_max=Clock(100 + first + rows),
            clock_max_offset=first,
            increasing=False,
        )

    @st.composite
    def fragment(draw: st.DrawFn) -> Fragment:
        lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        firsts = [sum(lengths[:at]) for at in range(len(lengths))]
        data = draw(st.binary(max_size=300))
        inline = draw(st.booleans())
        return Fragment(
            begin=draw(st.integers(0, 50)) * 100,
            revision=draw(st.integers(1, 9)),
            rows=sum(lengths),
            bytes=draw(st.integers(0, 1000)),
            at=Inline(data=data) if inline else Blob(path="a/b", row=3),
            schema="f00d",
            runs=tuple(
                run(f, n, at) for at, (f, n) in enumerate(zip(firsts, lengths, strict=True))
            ),
            key_hash_min=0,
            key_hash_max=9,
        )

    @st.composite
    def delivery(draw: st.DrawFn) -> Delivery:
        fragments = draw(st.lists(fragment(), min_size=1, max_size=6, unique_by=lambda f: f.begin))
        rows = [
            VisibleRows(
                fragment=each,
                run=draw(st.sampled_from(each.runs)),
                clock_gt=Clock(draw(st.integers(0, 200))),
                running_max=draw(st.booleans()),
            )
            for each in fragments
        ]
        return Delivery(
            # A journal of its own: fragments of one journal have different offsets.
            journal=f"j{draw(st.integers(0, 1 << 40))}",
            binding=draw(st.integers(0, 9)),
            producer=P1,
            commit=Clock(draw(st.integers(300, 1 << 63))),
            rows=tuple(rows),
            bytes=draw(st.integers(0, 1 << 40)),
        )

    return st.lists(delivery(), max_size=5, unique_by=lambda d: d.journal)


@given(frontiers(), deliveries(), st.integers(1, 3000))
def test_a_checkpoint_is_put_together_from_its_parts(
    frontier: Frontier, given: list[Delivery], part_bytes: int
) -> None:
    checkpoint = Checkpoint(frontier=frontier, deliveries=tuple(given))
    assembly = wire.CheckpointAssembly()
    parts = list(wire.checkpoint_parts(3, checkpoint, part_bytes))
    sent = [pb.CheckpointPart.FromString(part.SerializeToString()) for part in parts]
    *unfinished, found = [assembly.add(part) for part in sent]
    assert unfinished == [None] * (len(parts) - 1)
    assert found == checkpoint
    assert all(part.ByteSize() < part_bytes + 2000 for part in parts)


@given(frontiers(), st.integers(1, 200))
def test_an_opening_is_put_together_from_its_parts(frontier: Frontier, part_bytes: int) -> None:
    requests = list(wire.open_requests("acme/both", frontier, part_bytes))
    assert [each.open.more for each in requests] == [True] * (len(requests) - 1) + [False]
    assert (requests[0].open.name, requests[0].open.shards) == ("acme/both", 1)
    assert wire.decode_resume(b"".join(each.open.resume for each in requests)) == frontier


def test_what_no_service_sends_is_refused() -> None:
    part = pb.CheckpointPart(checkpoint=1, deliveries=[pb.Delivery(journal=4)])
    with pytest.raises(wire.MalformedMessage):
        wire.CheckpointAssembly().add(part)
    assembly = wire.CheckpointAssembly()
    assembly.add(pb.CheckpointPart(checkpoint=1, more=True))
    with pytest.raises(wire.MalformedMessage, match="checkpoint 2 within 1"):
        assembly.add(pb.CheckpointPart(checkpoint=2))
