"""Two collections, a coordinator that follows them, and what it finds there."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from journal.publishing import World, batch, collection
from penstock.journal.follower import current_revision
from penstock.journal.fragments import FragmentLayout, read_visible
from penstock.journal.planning import Planner
from penstock.journal.publisher import Mapped, Publisher, PublisherOptions
from penstock.journal.rows import stamp_rows, to_lines
from penstock.journal.selector import PartitionFilter
from penstock.journal.state import AckRecord
from penstock.journal.transaction import BatchLimits, Parts, close
from penstock.model.clock import Clock, Flag, Producer, from_unix
from penstock.model.frontier import EMPTY, Frontier
from penstock.model.resume import prepare_resume
from penstock.model.spec import CollectionSpec, Selector
from penstock.shuffle.binding import Binding, with_cohorts
from penstock.shuffle.delivery import Checkpoint
from penstock.shuffle.session import Session
from support.fragments import write_fragment

ORDERS = collection("acme/orders")
PAYMENTS = collection("acme/payments", partitioned=False)

START = from_unix(1_700_000_000)
NOW = from_unix(1_800_000_000)
"""Later than everything that is written here."""

SPLIT = PublisherOptions(limits=BatchLimits(journals=1))
"""Every ACK in a store transaction of its own: hints are all that keeps them together."""


class Seen(NamedTuple):
    """A document, as somebody found it."""

    binding: int
    journal: str
    id: int
    text: str


class Follows(Protocol):
    """What a session offers, here and elsewhere."""

    async def next_checkpoint(self) -> Checkpoint: ...
    async def caught_up(self, revision: int) -> None: ...


def binding(index: int, spec: CollectionSpec, **other: Any) -> Binding:  # noqa: ANN401
    fields = [each.name for each in spec.partitions]
    return Binding(
        index=index,
        collection=spec,
        read_suffix=f"test/{index}",
        key=spec.key,
        partitions=PartitionFilter.of(fields, Selector()),
        **other,
    )


BOTH = with_cohorts([binding(0, ORDERS), binding(1, PAYMENTS)])


def planner(world: World) -> Planner:
    return Planner(journals=world.journals, blobs=world.blobs, schemas=world.schemas)


def publisher(world: World, options: PublisherOptions = PublisherOptions()) -> Publisher:  # noqa: B008 - frozen
    return world.publisher(Mapped(spec=ORDERS), Mapped(spec=PAYMENTS), options=options)


async def publish(
    to: Publisher, ids: Iterable[int], text: str = "", *, payments: bool = True
) -> None:
    """Documents of these ids, in three partitions of orders, and in payments too."""
    documents = [
        {"id": i, "region": ("eu", "us", "ap")[i % 3], "text": text or f"t{i}"} for i in ids
    ]
    await to.publish(0, batch(documents, ORDERS))
    if payments:
        await to.publish(1, batch(documents, PAYMENTS))


async def write(
    world: World,
    *ids: int,
    text: str = "",
    options: PublisherOptions = PublisherOptions(),  # noqa: B008
) -> None:
    """A transaction by a producer of its own, in orders and in payments."""
    to = publisher(world, options)
    await publish(to, ids, text)
    await to.write_intents(await to.commit())


async def torn(world: World, *ids: int, acknowledged: int) -> list[Parts]:
    """A transaction whose writer died after some of its ACKs; the ACKs that are missing.

    Journals are acknowledged in the order of their names: three of orders, then that of payments.
    """
    to = publisher(world, SPLIT)
    await publish(to, ids)
    acks = close(await to.commit(), {}, SPLIT.limits).acks
    for parts in acks[:acknowledged]:
        await world.journals.append_all(parts)
    return list(acks[acknowledged:])


async def append_rows(
    world: World, journal: str, producer: Producer, clocks: Iterable[int], flags: Flag
) -> None:
    """Rows of payments as no publisher of ours would write them; clocks count from `START`."""
    clocks = list(clocks)
    documents = batch([{"id": c, "region": None, "text": "by hand"} for c in clocks], PAYMENTS)
    layout = FragmentLayout.of(PAYMENTS)
    await world.schemas.put(PAYMENTS.write_schema)
    rows = [
        stamp_rows(
            documents.slice(at, 1),
            layout.root,
            producer=producer,
            first_clock=Clock(START + clock),
            flags=flags,
        )
        for at, clock in enumerate(clocks)
    ]
    fragment = write_fragment(world.blobs, journal.rpartition("/")[0], layout, rows, "test")
    assert fragment is not None
    await world.journals.append(journal, [fragment])


async def append_ack(world: World, journal: str, producer: Producer, clock: int) -> None:
    ack = AckRecord(producer=producer, clock=Clock(START + clock))
    await world.journals.append(journal, [ack])


@asynccontextmanager
async def session(
    world: World,
    bindings: Iterable[Binding] = BOTH,
    **options: Any,  # noqa: ANN401 - those of `Session.open`
) -> AsyncIterator[Session]:
    options.setdefault("now", lambda: NOW)
    opened = await Session.open(planner(world), tuple(bindings), **options)
    try:
        yield opened
    finally:
        await opened.close()


async def documents(world: World, checkpoint: Checkpoint) -> list[Seen]:
    """The documents of a checkpoint, read as any process could that has it."""
    found: list[Seen] = []
    for delivery in checkpoint.deliveries:
        for rows in delivery.rows:
            root = await world.schemas.layout(rows.fragment.schema)
            for read in read_visible(world.blobs, rows, root):
                found += (
                    Seen(delivery.binding, delivery.journal, d["id"], d.get("text", ""))
                    for d in map(json.loads, to_lines(read, root))
                )
    return found


@dataclass
class Coordinator:
    """Takes transactions from sessions, and remembers what a task would have stored."""

    world: World
    committed: Frontier = field(default_factory=lambda: EMPTY)
    prepared: Frontier = field(default_factory=lambda: EMPTY)
    """Of the last transaction, which may have happened or not."""
    taken: list[Seen] = field(default_factory=list)
    peeks: int = 0

    async def transaction(self, session: Follows) -> list[Seen]:
        """The documents of the next transaction, which is committed."""
        found = await self.prepare(session)
        assert found is not None
        self.commit()
        self.taken += found
        return found

    async def prepare(
        self,
        session: Follows,
        caught_up: asyncio.Task[None] | None = None,
        patience_s: float | None = None,
    ) -> list[Seen] | None:
        """The documents of checkpoints up to one without unresolved hints; None if caught up.

        Raises TimeoutError if a checkpoint does not come: what was taken before is lost.
        """
        frontier, taken = EMPTY, []
        while True:
            async with asyncio.timeout(patience_s):
                checkpoint = await _next(session, caught_up)
            if checkpoint is None:
                return None
            assert checkpoint.frontier, "a checkpoint is never empty"
            frontier = frontier.reduce(checkpoint.frontier)
            taken.append(checkpoint)
            if not checkpoint.is_peek:
                break
            self.peeks += 1
        found = [seen for each in taken for seen in await documents(self.world, each)]
        self.prepared = frontier.clear_discharged_hints()
        return found

    def commit(self) -> None:
        self.committed = self.committed.reduce(self.prepared).clear_discharged_hints()

    async def everything(self, session: Follows) -> None:
        """Take all that is committed now."""
        revision = await current_revision(self.world.journals.store)
        caught_up = asyncio.create_task(session.caught_up(revision))
        while (found := await self.prepare(session, caught_up)) is not None:
            self.commit()
            self.taken += found
        await caught_up

    @property
    def recovery(self) -> Frontier:
        """What to resume from if the last transaction was prepared, and no more is known."""
        return prepare_resume(self.committed, self.prepared)


async def _next(session: Follows, caught_up: asyncio.Task[None] | None) -> Checkpoint | None:
    asked = asyncio.create_task(session.next_checkpoint())
    waiting = [asked] if caught_up is None else [asked, caught_up]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return asked.result() if asked.done() else None
    finally:
        asked.cancel()
        await asyncio.wait([asked])


Open = Callable[[Frontier], AbstractAsyncContextManager[Follows]]


class Restless:
    """Reads transactions in sessions that end in every way in which a task can crash."""

    def __init__(
        self, reader: Coordinator, rng: random.Random, check: Callable[[list[Seen]], None]
    ) -> None:
        self.reader = reader
        self.transactions = 0
        self.recoveries = 0
        self._rng = rng
        self._check = check

    async def read(self, open_session: Open, ended: asyncio.Event) -> None:
        """Read until everything was written, and taken."""
        while not ended.is_set():
            async with open_session(self.reader.committed) as reading:
                prepared = await self._read_some(reading)
            if prepared is not None:
                await self._recover(open_session, prepared)
        async with open_session(self.reader.committed) as reading:
            await self.reader.everything(reading)

    async def _read_some(self, reading: Follows) -> list[Seen] | None:
        """Some transactions; of the last one, what was read, if it was prepared and no more."""
        for _ in range(self._rng.randint(1, 6)):
            try:
                patience_s = self._rng.uniform(0.1, 2.0)
                found = await self.reader.prepare(reading, patience_s=patience_s)
            except TimeoutError:
                return None  # in the middle of a transaction, perhaps: nothing of it is stored
            assert found is not None
            self._check(found)
            match self._rng.choice(("commit", "commit", "commit", "forget", "recover")):
                case "commit":
                    self.reader.commit()
                    self.reader.taken += found
                    self.transactions += 1
                case "forget":
                    return None
                case "recover":
                    return found
        return None

    async def _recover(self, open_session: Open, prepared: list[Seen]) -> None:
        async with open_session(self.reader.recovery) as reading:
            found = await self.reader.prepare(reading)
        assert found is not None
        assert sorted(found) == sorted(prepared), "a recovery is the transaction that was prepared"
        self.reader.commit()
        self.reader.taken += found
        self.recoveries += 1


def ids(found: Iterable[Seen], index: int) -> list[int]:
    return sorted(each.id for each in found if each.binding == index)


def repeated(found: Iterable[Seen]) -> list[Seen]:
    return [each for each, times in Counter(found).items() if times > 1]
