"""A client process: random operations on a store until it is stopped, then its history.

    python client.py CONFIG.json

It takes commands on standard input: `stop` ends the operations; `drain` waits until the
subscriptions have received everything, writes the history and exits. The exit code is 3 if the
store was reset.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import msgspec

from chaos.workload import Client, StoreReset
from penstock.consensus.committer.client import RpcConsensus, RpcOptions
from penstock.consensus.store import Consensus, ConsensusError, Entry, Resync
from support.history import Op, Stream, Version

EXIT_RESET = 3
_DRAIN_S_MAX = 30


class Config(msgspec.Struct, kw_only=True):
    name: str
    committers: dict[str, str]
    """Name to URL; every operation picks one of them."""
    keys: list[str]
    subscribed: list[str]
    tasks: int
    seed: int
    think_s: float
    """Upper bound of the pause between two operations of one task."""
    history: str


class Evidence(msgspec.Struct, kw_only=True):
    ops: list[Op]
    streams: list[Stream]
    reset: bool


class Subscriber:
    """Follows one key from its start through one committer; starts over after a resync."""

    def __init__(self, name: str, key: str, store: Consensus) -> None:
        self.name, self.key, self.store = name, key, store
        self.streams: list[Stream] = []
        self.from_ = 0
        self.seen: list[Version] = []
        self.progress = asyncio.Condition()

    async def run(self) -> None:
        while True:
            async for event in self.store.subscribe(self.key, self.from_):
                match event:
                    case Entry(data):
                        self.seen.append(Version(data.seqno, data.data.decode(), data.revision))
                        async with self.progress:
                            self.progress.notify_all()
                    case Resync() as resync:
                        self.close()
                        self.from_ = resync.floor
                    case _:
                        pass

    def close(self, waited_for: int | None = None) -> None:
        stream = Stream(
            process=self.name,
            key=self.key,
            from_=self.from_,
            seen=tuple(self.seen),
            waited_for=waited_for,
        )
        self.streams.append(stream)
        self.seen.clear()

    async def drain(self, head: int) -> None:
        def reached() -> bool:
            return head < self.from_ or any(v.seqno >= head for v in self.seen[-5:])

        try:
            async with asyncio.timeout(_DRAIN_S_MAX), self.progress:
                await self.progress.wait_for(reached)
        except TimeoutError:
            pass  # the checker will report what is missing
        self.close(waited_for=head if head >= self.from_ else None)


async def commands() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def operate(client: Client, think_s: float, stopping: asyncio.Event) -> None:
    while not stopping.is_set():
        await client.step()
        await asyncio.sleep(client.rng.random() * think_s)


async def run(config: Config) -> Evidence:
    orders = await commands()
    options = RpcOptions(read_s=5, page_s=5, write_s=5, silence_s=15)
    stores = {name: RpcConsensus(url, options) for name, url in config.committers.items()}
    ops: list[Op] = []
    stopping = asyncio.Event()
    clients = [
        Client(
            name=f"{config.name}.{n}",
            stores=list(stores.items()),
            keys=config.keys,
            rng=random.Random(config.seed * 100 + n),
            record=ops.append,
        )
        for n in range(config.tasks)
    ]
    subscribers = [
        Subscriber(f"{config.name}.{key}", key, list(stores.values())[n % len(stores)])
        for n, key in enumerate(config.subscribed)
    ]
    following = [asyncio.create_task(subscriber.run()) for subscriber in subscribers]
    working = [asyncio.create_task(operate(c, config.think_s, stopping)) for c in clients]
    print("ready", flush=True)  # noqa: T201
    await orders.readline()
    stopping.set()
    ended = await asyncio.gather(*working, return_exceptions=True)
    reset = any(isinstance(each, StoreReset) for each in ended)
    for each in ended:
        if isinstance(each, BaseException) and not isinstance(each, StoreReset):
            raise each
    print("stopped", flush=True)  # noqa: T201
    await orders.readline()
    if not reset:
        store = next(iter(stores.values()))
        for subscriber in subscribers:
            newest = await store.head(subscriber.key, fresh=True)
            if newest is not None:
                await subscriber.drain(newest.seqno)
    for task in following:
        task.cancel()
    failed = await asyncio.gather(*following, return_exceptions=True)
    for each in failed:
        expected = isinstance(each, asyncio.CancelledError) or (
            reset and isinstance(each, ConsensusError)
        )
        if isinstance(each, BaseException) and not expected:
            raise each
    streams = [stream for subscriber in subscribers for stream in subscriber.streams]
    return Evidence(ops=ops, streams=streams, reset=reset)


def main() -> None:
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Config)
    evidence = asyncio.run(run(config))
    Path(config.history).write_bytes(msgspec.msgpack.encode(evidence))
    sys.exit(EXIT_RESET if evidence.reset else 0)


if __name__ == "__main__":
    main()
