"""Faults to inject. Each nemesis breaks something for a while, and then restores it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from chaos.proxy import Proxy
from penstock.testing.postgres import PostgresServer
from penstock_bench.persistd_process import PersistdProcess


@dataclass(frozen=True)
class World:
    """Everything a nemesis can reach; without PostgreSQL, the committers use SQLite."""

    rng: random.Random
    committers: tuple[PersistdProcess, ...]
    to_committers: tuple[Proxy, ...]
    postgres: PostgresServer | None = None
    to_postgres: Proxy | None = None

    async def pause(self, scale: float = 1.0) -> None:
        await asyncio.sleep(self.rng.uniform(0.3, 1.0) * scale)

    def pick_committer(self) -> PersistdProcess:
        return self.rng.choice(self.committers)

    def pick_path(self) -> Proxy:
        paths = [*self.to_committers, *([self.to_postgres] if self.to_postgres else [])]
        return self.rng.choice(paths)


Nemesis = Callable[[World], Awaitable[None]]


async def kill_committer(world: World) -> None:
    victim = world.pick_committer()
    await asyncio.to_thread(victim.kill)
    await asyncio.to_thread(victim.start)


async def pause_committer(world: World) -> None:
    victim = world.pick_committer()
    victim.pause()
    try:
        await world.pause()
    finally:
        victim.resume()


async def kill_postgres(world: World) -> None:
    assert world.postgres is not None
    await asyncio.to_thread(world.postgres.kill)
    await world.pause(0.3)
    await asyncio.to_thread(world.postgres.start)


async def partition(world: World) -> None:
    """Hold all bytes in one direction or both, then let them through."""
    path = world.pick_path()
    path.hold(*world.rng.choice((("up",), ("down",), ("up", "down"))))
    await world.pause()
    path.restore()


async def drop_replies(world: World) -> None:
    """Deliver requests, and lose their replies for good."""
    path = world.pick_path()
    path.hold("down")
    await world.pause()
    path.cut()
    path.restore()


async def cut_connections(world: World) -> None:
    path = world.pick_path()
    for _ in range(3):
        path.cut(refuse=True)
        await world.pause(0.2)
        path.restore()
        await world.pause(0.2)


async def delay(world: World) -> None:
    path = world.pick_path()
    path.delay_s = world.rng.uniform(0.05, 0.3)
    await world.pause()
    path.restore()


WITH_POSTGRES: tuple[Nemesis, ...] = (
    kill_committer, pause_committer, kill_postgres, partition, drop_replies, cut_connections, delay,
)  # fmt: skip
WITH_SQLITE: tuple[Nemesis, ...] = tuple(n for n in WITH_POSTGRES if n is not kill_postgres)


async def torment(world: World, nemeses: tuple[Nemesis, ...], seconds: float) -> list[str]:
    """Run each nemesis once, then random pairs until the time is up; return their names."""
    deadline = asyncio.get_running_loop().time() + seconds
    done: list[str] = []
    for nemesis in world.rng.sample(nemeses, len(nemeses)):
        done.append(nemesis.__name__)
        await nemesis(world)
        await world.pause(0.5)
    while asyncio.get_running_loop().time() < deadline:
        pair = world.rng.sample(nemeses, 2)
        if {kill_committer, pause_committer} != set(pair):  # one would kill what the other resumes
            done.append(" + ".join(nemesis.__name__ for nemesis in pair))
            await asyncio.gather(*(nemesis(world) for nemesis in pair))
            await world.pause()
    return done
