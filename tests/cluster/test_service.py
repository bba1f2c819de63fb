"""Sessions over gRPC, on loopback: who is heard, who is refused, and what is left behind.

The numbers are those of the scenarios that every cluster has to stand (reconnects, drops, fencing).
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from cluster.forms import Remote
from consensus.committer.scripted import eventually
from penstock.cluster import wire
from penstock.cluster.claim import claim_cluster
from penstock.cluster.introspect import COMMANDS_MAX, WitnessedMachine
from penstock.cluster.proto import cluster_pb2 as pb
from penstock.cluster.service import ClusterService, serving
from penstock.cluster.sessions import (
    Closed,
    CloseReason,
    Done,
    Hello,
    InitializationComplete,
    Message,
    Opened,
    Response,
    Sessions,
)
from penstock.cluster.state import (
    ClusterMachine,
    ClusterState,
    CommandOutcome,
    Compact,
    Put,
    log_key,
)
from penstock.consensus.open import open_consensus
from penstock.consensus.statelog import follow, load
from penstock.consensus.store import Consensus
from penstock.errors import Unavailable, UsageError, UserError
from penstock.model.domain import Domain
from penstock.runtime.ops import TASK_KINDS
from penstock.servicekit.rpc.listener import server_credentials
from penstock.servicekit.rpc.tokens import TokenFile
from penstock.settings import sqlite_url
from servicekit.rpc.certificates import certificate

SOON_S = 30.0
CLUSTER = "test"

R = TypeVar("R", bound=Response)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Consensus]:
    opened = await open_consensus(sqlite_url(tmp_path / "consensus.db"))
    yield opened
    await opened.close()


async def _at_once() -> None:
    """Nothing is to be done before."""


class Served:
    """A cluster's sessions behind a port, and controllers of it."""

    def __init__(self, sessions: Sessions, service: ClusterService, url: str) -> None:
        self.sessions = sessions
        self.service = service
        self.url = url

    def says(self, *said: Message, options: str = "") -> Remote:
        return Remote(self.url + options, *said)


@asynccontextmanager
async def served(store: Consensus, **options: Any) -> AsyncIterator[Served]:  # noqa: ANN401
    listening = {name: options.pop(name) for name in ("listen", "credentials") if name in options}
    sessions = Sessions(store, CLUSTER)
    service = ClusterService(sessions, **options)
    async with serving(service, before=_at_once, **listening) as url:
        yield Served(sessions, service, url)


@pytest.fixture
async def here(store: Consensus) -> AsyncIterator[Served]:
    async with served(store) as cluster:
        yield cluster


async def state_of(store: Consensus) -> ClusterState:
    return (await load(store, log_key(CLUSTER), ClusterMachine())).state


async def until_open(cluster: Served, streams: int) -> None:
    await eventually(lambda: cluster.service.open == streams)


def hello(name: str, domain: Domain = Domain.STORAGE, protocol: int = 1) -> Hello:
    nonce = name.encode().ljust(wire.NONCE_BYTES, b".")
    return Hello(domain=domain, nonce=nonce, holder=f"controller {name}", protocol=protocol)


def capture(name: str, digest: str = "1") -> Put:
    return Put(kind="capture", name=name, digest=digest)


def derivation(name: str, digest: str = "1") -> Put:
    return Put(kind="derivation", name=name, digest=digest)


COMPLETE = InitializationComplete()


# ------------------------------------------------------------------------------------- reconnects


async def test_t01_ids_of_both_domains_come_from_one_log(store: Consensus, here: Served) -> None:
    storage = here.says(hello("s"), COMPLETE)
    compute = here.says(hello("c", Domain.COMPUTE), COMPLETE)
    await storage.serves()
    await compute.serves()
    for n in range(3):
        storage.say(capture(f"c{n}"))
        await storage.hears(Done)
        compute.say(derivation(f"d{n}"))
        await compute.hears(Done)
    objects = (await state_of(store)).objects.values()
    assert [each.dataflow_id for each in objects] == [1, 2, 3, 4, 5, 6]
    assert [each.domain for each in objects] == [Domain.STORAGE, Domain.COMPUTE] * 3


async def test_t05_both_domains_at_the_same_instant_and_every_reader_agrees(
    store: Consensus, here: Served
) -> None:
    """A derivation may be said before or after what it reads from: the order decides on ids only.

    It never fails half-way, and whoever follows the log gives the same ids to both.
    """
    storage = here.says(hello("s"), COMPLETE)
    compute = here.says(hello("c", Domain.COMPUTE), COMPLETE)
    await storage.serves()
    await compute.serves()
    following, seen = WitnessedMachine(), list[ClusterState]()

    async def follows() -> None:
        async for followed in follow(store, log_key(CLUSTER), following):
            seen.append(followed.replica.state)

    reader = asyncio.create_task(follows())
    orders = set()
    for n in range(1_000):
        first, second = (storage, compute) if n % 2 else (compute, storage)
        for each in (first, second):
            each.say(capture("x", str(n)) if each is storage else derivation("x", str(n)))
        for each in (storage, compute):
            assert (await each.hears(Done)).outcomes == (CommandOutcome.APPLIED,)
        objects = (await state_of(store)).objects
        ids = [objects[f"{kind}/x"].dataflow_id for kind in ("capture", "derivation")]
        assert sorted(ids) == [2 * n + 1, 2 * n + 2]
        orders.add(ids[0] < ids[1])
    assert orders == {True, False}
    await eventually(lambda: seen[-1].next_id == 2_001)
    reader.cancel()
    assert seen[-1] == await state_of(store)
    said = [row for row in following.commands() if row["command"] == "put"]
    assert len(said) == COMMANDS_MAX


async def test_t08_the_log_never_has_a_hello(store: Consensus, here: Served) -> None:
    await here.says(hello("a"), capture("a"), COMPLETE).serves()
    assert len(await store.scan(log_key(CLUSTER), 0)) == 2  # that it is open, and the batch


@pytest.mark.parametrize(
    ("said", "word"),
    [
        pytest.param([capture("a")], "first message", id="a command before Hello"),
        pytest.param([hello("1"), hello("2")], "second time", id="Hello twice"),
        pytest.param([hello("1"), COMPLETE, COMPLETE], "second time", id="complete twice"),
        pytest.param([hello("used", Domain.COMPUTE)], "nonce", id="a nonce that was used"),
        pytest.param([hello("1", protocol=2)], "same release for both", id="another release"),
        pytest.param([hello("1", protocol=0)], "same release for both", id="an older release"),
        pytest.param([hello("1"), capture("x" * 600)], "printable", id="a name that is none"),
        pytest.param([hello("1"), capture("")], "printable", id="no name"),
        pytest.param([hello("1"), Compact(id="x", since=1 << 63)], "outside", id="a late since"),
    ],
)
async def test_t09_what_must_not_come_closes_its_session_and_no_other(
    here: Served, said: list[Message], word: str
) -> None:
    good = here.says(hello("used", Domain.COMPUTE), COMPLETE)
    await good.serves()
    bad = here.says(*said)
    async with asyncio.timeout(SOON_S):
        answers = [answer async for answer in bad.session.responses()]
    closed = answers[-1]
    assert isinstance(closed, Closed)
    assert closed.reason is CloseReason.PROTOCOL
    assert word in closed.detail
    good.say(derivation("d"))
    assert (await good.hears(Done)).outcomes == (CommandOutcome.APPLIED,)


async def test_t10_a_storm_of_one_domain_leaves_the_other_alone(here: Served) -> None:
    compute = here.says(hello("c", Domain.COMPUTE), COMPLETE)
    await compute.serves()
    for n in range(30):
        storage = here.says(hello(f"s{n}"), capture("a"), COMPLETE)
        if n % 3:
            await storage.serves()
        compute.say(derivation("d", str(n)))
        assert (await compute.hears(Done)).outcomes == (CommandOutcome.APPLIED,)
        if n % 2:
            await storage.leaves()


@pytest.mark.parametrize("domain", Domain)
async def test_t11_a_domain_needs_no_other(store: Consensus, here: Served, domain: Domain) -> None:
    put = capture("x") if domain is Domain.STORAGE else derivation("x")
    done = await here.says(hello("only", domain), put, COMPLETE).serves()
    assert done.outcomes == (CommandOutcome.APPLIED,)
    assert list((await state_of(store)).sessions) == [domain]


async def test_t12_one_that_hangs_half_way_holds_up_nobody(store: Consensus, here: Served) -> None:
    hangs = here.says(hello("hangs"), capture("a"), capture("b"))
    await hangs.hears(Opened)
    began = time.monotonic()
    await here.says(hello("next"), capture("c"), COMPLETE).serves()
    assert time.monotonic() - began < SOON_S / 3
    closed = await hangs.hears(Closed)
    assert closed.reason is CloseReason.SUPERSEDED
    assert closed.detail == "controller next"
    assert list((await state_of(store)).objects) == ["capture/c"]


async def test_t13_t37_what_a_deposed_controller_still_says_has_no_effect(
    store: Consensus, here: Served
) -> None:
    old = here.says(hello("old"), COMPLETE)
    await old.serves()
    old.say(*(capture(f"old{n}") for n in range(50)))
    new = here.says(hello("new"), capture("new"), COMPLETE)
    await new.serves()
    old.say(*(capture(f"late{n}") for n in range(50)))
    new.say(capture("more"))
    await new.hears(Done)
    assert list((await state_of(store)).objects) == ["capture/new", "capture/more"]


async def test_t14_commands_right_behind_the_batch_come_after_it_and_in_order(
    store: Consensus, here: Served
) -> None:
    later = [capture("x", f"later {n}") for n in range(20)]
    remote = here.says(hello("b"), capture("x"), COMPLETE, *later)
    assert (await remote.serves()).outcomes == (CommandOutcome.APPLIED,)
    seen: list[CommandOutcome] = []
    while len(seen) < 20:
        seen += (await remote.hears(Done)).outcomes
    assert seen == [CommandOutcome.APPLIED] * 20
    assert (await state_of(store)).objects["capture/x"].digest == "later 19"


async def test_t15_answers_for_one_session_never_reach_the_next(here: Served) -> None:
    old = here.says(hello("old"), COMPLETE)
    await old.serves()
    old.say(*(capture(f"old{n}") for n in range(100)))
    new = here.says(hello("new"), capture("a"), capture("b"), COMPLETE)
    opened = await new.hears(Opened)
    assert opened.epoch == 2
    done = await new.hears(Done)
    assert done.initialized
    assert len(done.outcomes) == 2  # its own, and nothing but its own
    new.say(Compact(id="capture/a"))
    assert (await new.hears(Done)).outcomes == (CommandOutcome.APPLIED,)


# ------------------------------------------------------------------------------ reconcile and drop


async def test_t17_to_t20_drops_are_classified(
    here: Served, caplog: pytest.LogCaptureFixture
) -> None:
    gone, never = Compact(id="capture/x"), Compact(id="capture/never")
    remote = here.says(hello("a"), capture("x"), gone, COMPLETE)  # T17: both in one batch
    done = await remote.serves()
    assert done.outcomes[0] is CommandOutcome.DROPPED
    for command, outcome in (
        (gone, CommandOutcome.DROPPED),  # T18: twice, and T20: after its batch
        (Compact(id="capture/x", since=3), CommandOutcome.DROPPED),
        (never, CommandOutcome.UNKNOWN),  # T19
    ):
        warned = len(caplog.records)
        remote.say(command)
        assert (await remote.hears(Done)).outcomes == (outcome,)
        assert (len(caplog.records) > warned) == (outcome is CommandOutcome.UNKNOWN)
    assert "is about nothing" in caplog.text


async def test_t21_t22_a_batch_drops_what_it_does_not_say_and_keeps_what_is_equal(
    store: Consensus, here: Served
) -> None:
    await here.says(hello("1"), capture("a"), capture("b"), COMPLETE).serves()
    before = (await state_of(store)).objects
    again = here.says(hello("2"), capture("a"), capture("b"), COMPLETE)
    opened = await again.hears(Opened)
    assert opened.digests == {"capture/a": "1", "capture/b": "1"}
    done = await again.hears(Done)
    assert done.seqno is None  # nothing was to be logged
    assert done.outcomes == (CommandOutcome.KEPT,) * 2
    assert (await state_of(store)).objects == before
    await here.says(hello("3"), capture("b"), COMPLETE).serves()
    assert (await state_of(store)).objects == {"capture/b": before["capture/b"]}


# --------------------------------------------------------------------------------------- transport


async def test_a_controller_that_leaves_takes_its_session_with_it(here: Served) -> None:
    remotes = [here.says(hello(domain.value, domain), COMPLETE) for domain in Domain]
    for remote in remotes:
        await remote.serves()
    assert here.service.open == 2
    for remote in remotes:
        await remote.leaves()
    await until_open(here, 0)


async def test_a_stream_that_says_nothing_is_closed(store: Consensus) -> None:
    async with served(store, hello_s=0.2) as cluster:
        closed = await cluster.says().hears(Closed)
        assert closed.reason is CloseReason.PROTOCOL
        assert "Hello did not come" in closed.detail
        await until_open(cluster, 0)


async def test_streams_are_limited(store: Consensus) -> None:
    async with served(store, sessions_max=2) as cluster:
        remotes = [cluster.says(hello(domain.value, domain), COMPLETE) for domain in Domain]
        for remote in remotes:
            await remote.serves()
        closed = await cluster.says(hello("third")).hears(Closed)
        assert closed.reason is CloseReason.FAILED  # it may come again
        assert "2 sessions are open" in closed.detail
        await remotes[0].leaves()
        await until_open(cluster, 1)
        await cluster.says(hello("fourth"), COMPLETE).serves()


@pytest.mark.parametrize(
    ("data", "word"),
    [
        pytest.param(b"\xff" * 40, "cannot be decoded", id="garbage"),
        pytest.param(b"", "does not know", id="nothing"),
        pytest.param(
            pb.ToCluster(hello=pb.Hello(domain="network", nonce=b"1" * 16, holder="x")),
            "no domain",
            id="another domain",
        ),
        pytest.param(
            pb.ToCluster(hello=pb.Hello(domain="storage", nonce=b"1", holder="x")),
            "nonce",
            id="a short nonce",
        ),
        pytest.param(
            pb.ToCluster(put=pb.Put(kind="thing", name="x", digest="1")), "no kind", id="a kind"
        ),
    ],
)
async def test_hostile_messages_close_their_stream_only(
    here: Served, data: bytes | pb.ToCluster, word: str
) -> None:
    good = here.says(hello("good", Domain.COMPUTE), COMPLETE)
    await good.serves()
    async with aio.insecure_channel(here.url.removeprefix("grpc://")) as channel:
        call = channel.stream_stream(wire.SESSION)()
        await call.write(data if isinstance(data, bytes) else data.SerializeToString())
        answer = pb.FromCluster.FromString(await call.read())
        assert answer.closed.reason == "PROTOCOL"
        assert word in answer.closed.detail
        await call.done_writing()
    good.say(derivation("d"))
    assert (await good.hears(Done)).outcomes == (CommandOutcome.APPLIED,)


async def test_a_message_that_is_too_large_is_not_read(here: Served) -> None:
    async with aio.insecure_channel(here.url.removeprefix("grpc://")) as channel:
        call = channel.stream_stream(wire.SESSION)()
        await call.write(b"x" * (2 << 20))
        assert (await call.code()).name == "RESOURCE_EXHAUSTED"
    await here.says(hello("next"), COMPLETE).serves()


async def test_an_address_that_is_no_cluster_is_said_to_be_none() -> None:
    server = aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        closed = await Remote(f"grpc://127.0.0.1:{port}", hello("a")).hears(Closed)
    finally:
        await server.stop(0)
    assert closed.reason is CloseReason.REFUSED
    assert "this is no cluster" in closed.detail


async def test_a_port_that_is_taken_is_said_to_be_before_anything_is_done(
    store: Consensus, here: Served
) -> None:
    async def never() -> None:
        raise AssertionError("it must have the port first")

    service = ClusterService(Sessions(store, CLUSTER))
    taken = here.url.removeprefix("grpc://")
    with pytest.raises(Unavailable, match=r"cannot listen on .*\n.*in use"):
        async with serving(service, listen=taken, before=never):
            pass


async def test_a_socket_for_those_of_the_same_user(store: Consensus, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    async with served(store, listen=f"unix:{directory}/cluster.sock") as cluster:
        assert cluster.url == f"grpc+unix://{directory}/cluster.sock"
        await cluster.says(hello("a"), COMPLETE).serves()


async def test_other_hosts_need_tls_and_tokens(store: Consensus) -> None:
    service = ClusterService(Sessions(store, CLUSTER))
    with pytest.raises(UsageError, match="without both TLS and tokens"):
        async with serving(service, listen="0.0.0.0:0", before=_at_once):
            pass


# ------------------------------------------------------------------------------------------ tokens


def line(name: str, token: str, role: str = "writer", prefix: str = "cluster/") -> str:
    return f"{name} {role} {prefix} {hashlib.sha256(token.encode()).hexdigest()}\n"


def write_secret(path: Path, text: str) -> Path:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    new.rename(path)
    return path


async def test_tokens_say_who_may_speak_for_which_domain(store: Consensus, tmp_path: Path) -> None:
    file = write_secret(
        tmp_path / "tokens",
        line("all", "t-all")
        + line("storage", "t-storage", prefix=f"cluster/{CLUSTER}/storage")
        + line("reads", "t-reads", role="reader")
        + line("appends", "t-appends", role="read,list,append")
        + line("applies", "t-applies", role="apply")
        + line("journals", "t-journals", prefix="journal/"),
    )
    tokens = {
        name: write_secret(tmp_path / name, f"t-{name}")
        for name in ("all", "storage", "reads", "appends", "applies", "journals", "wrong")
    }
    async with served(store, tokens=TokenFile(file)) as cluster:

        async def outcome(name: str | None, domain: Domain) -> str:
            options = "" if name is None else f"?token_file={tokens[name]}"
            remote = cluster.says(hello(f"{name}-{domain}", domain), options=options)
            async with asyncio.timeout(SOON_S):
                answer = await anext(remote.session.responses())
            await remote.leaves()
            if isinstance(answer, Closed):
                assert answer.reason is CloseReason.REFUSED
                return answer.detail
            return "opened"

        assert await outcome("all", Domain.STORAGE) == "opened"
        assert await outcome("storage", Domain.STORAGE) == "opened"
        assert "storage may not apply" in await outcome("storage", Domain.COMPUTE)
        assert "reads may not apply" in await outcome("reads", Domain.STORAGE)
        assert "appends may not apply" in await outcome("appends", Domain.STORAGE)
        assert await outcome("applies", Domain.COMPUTE) == "opened"
        assert "journals may not apply" in await outcome("journals", Domain.STORAGE)
        assert "the token is not valid" in await outcome("wrong", Domain.STORAGE)
        assert "a token is required" in await outcome(None, Domain.STORAGE)


async def test_a_token_that_is_revoked_ends_its_open_stream(
    store: Consensus, tmp_path: Path
) -> None:
    file = write_secret(tmp_path / "tokens", line("old", "t-old") + line("other", "t-other"))
    token = write_secret(tmp_path / "token", "t-old")
    other = write_secret(tmp_path / "other", "t-other")
    async with served(store, tokens=TokenFile(file)) as cluster:
        remote = cluster.says(hello("a"), COMPLETE, options=f"?token_file={token}")
        stays = cluster.says(hello("b", Domain.COMPUTE), COMPLETE, options=f"?token_file={other}")
        await remote.serves()
        await stays.serves()
        write_secret(file, line("new", "t-new") + line("other", "t-other"))
        closed = await remote.hears(Closed)
        assert closed.reason is CloseReason.FAILED  # to be tried again: tokens are rotated
        assert "not in force" in closed.detail
        again = cluster.says(hello("c"), options=f"?token_file={token}")
        assert (await again.hears(Closed)).reason is CloseReason.REFUSED
        write_secret(token, "t-new")
        await cluster.says(hello("d"), COMPLETE, options=f"?token_file={token}").serves()
        stays.say(derivation("d"))
        assert (await stays.hears(Done)).outcomes == (CommandOutcome.APPLIED,)


async def test_tls(store: Consensus, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "cluster")
    other, _ = certificate(tmp_path, "other")
    credentials = server_credentials(cert, key, None)
    async with served(store, credentials=credentials) as cluster:
        await cluster.says(hello("a"), COMPLETE, options=f"?ca={cert}").serves()
        for options in ("", f"?ca={other}"):
            closed = await cluster.says(hello("b"), options=options).hears(Closed)
            assert closed.reason is CloseReason.FAILED


async def test_a_token_whose_time_is_over_ends_its_open_stream(
    store: Consensus, tmp_path: Path
) -> None:
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=2)
    until = f" until={ends.isoformat()}\n"
    file = write_secret(tmp_path / "tokens", line("short", "t-short").strip() + until)
    token = write_secret(tmp_path / "token", "t-short")
    async with served(store, tokens=TokenFile(file)) as cluster:
        remote = cluster.says(hello("a"), COMPLETE, options=f"?token_file={token}")
        await remote.serves()
        assert "not in force" in (await remote.hears(Closed)).detail
        again = cluster.says(hello("b"), options=f"?token_file={token}")
        assert "the token has expired" in (await again.hears(Closed)).detail


async def test_certificates_of_clients(store: Consensus, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "cluster")
    client, client_key = certificate(tmp_path, "client")
    stranger, stranger_key = certificate(tmp_path, "stranger")
    credentials = server_credentials(cert, key, client)
    async with served(store, credentials=credentials) as cluster:
        known = f"?ca={cert}&cert={client}&key={client_key}"
        await cluster.says(hello("a"), COMPLETE, options=known).serves()
        for options in (f"?ca={cert}", f"?ca={cert}&cert={stranger}&key={stranger_key}"):
            closed = await cluster.says(hello("b"), options=options).hears(Closed)
            assert closed.reason is CloseReason.FAILED


# ------------------------------------------------------------------------------------------ claims


async def test_sessions_of_a_process_that_lost_the_cluster_are_closed(
    store: Consensus, here: Served
) -> None:
    here.sessions.claim = await claim_cluster(store, CLUSTER)
    remote = here.says(hello("a"), COMPLETE)
    await remote.serves()
    await claim_cluster(store, CLUSTER)
    late = here.says(hello("b", Domain.COMPUTE), COMPLETE)
    closed = await late.hears(Closed)
    assert closed.reason is CloseReason.MOVED
    assert "process" in closed.detail
    here.sessions.observe(await state_of(store))
    assert (await remote.hears(Closed)).reason is CloseReason.MOVED
    assert list((await state_of(store)).sessions) == [Domain.STORAGE]


# -------------------------------------------------------------------------------------- properties

texts = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=60)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Hello,
        domain=st.sampled_from(list(Domain)),
        nonce=st.binary(min_size=16, max_size=16),
        holder=texts,
        protocol=st.integers(0, 1 << 31),
    ),
    st.builds(Put, kind=st.sampled_from(TASK_KINDS), name=texts, digest=texts),
    st.builds(Compact, id=texts, since=st.none() | st.integers(0, (1 << 63) - 1)),
    st.just(COMPLETE),
)
responses: st.SearchStrategy[Response] = st.one_of(
    st.builds(
        Opened, epoch=st.integers(1, 1 << 60), digests=st.dictionaries(texts, texts, max_size=3)
    ),
    st.builds(
        Done,
        seqno=st.none() | st.integers(0, 1 << 60),
        outcomes=st.lists(st.sampled_from(list(CommandOutcome)), max_size=5).map(tuple),
        initialized=st.booleans(),
    ),
    st.builds(Closed, reason=st.sampled_from(list(CloseReason)), detail=texts),
)


@given(messages)
def test_what_is_said_is_what_is_heard(message: Message) -> None:
    assert wire.decode_message(wire.encode_message(message).SerializeToString()) == message


@given(responses)
def test_what_is_answered_is_what_is_heard(response: Response) -> None:
    sent = pb.FromCluster.FromString(wire.encode_response(response).SerializeToString())
    assert wire.decode_response(sent) == response


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_say_something_or_be_refused(data: bytes) -> None:
    try:
        wire.decode_message(data)
    except UserError as error:
        assert error.what  # noqa: PT017
