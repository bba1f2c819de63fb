"""What goes wrong, and for how long. A nemesis leaves the world as it found it, only later."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from chaos.proxy import Proxy
from penstock.testing.persistd import Persistd
from penstock.testing.postgres import PostgresServer


@dataclass(frozen=True)
class World:
    """Everything a nemesis can reach; without PostgreSQL, the committers are on SQLite."""

    rng: random.Random
    committers: tuple[Persistd, ...]
    to_committers: tuple[Proxy, ...]
    postgres: PostgresServer | None = None
    to_postgres: Proxy | None = None

    async def a_while(self, scale: float = 1.0) -> None:
        await asyncio.sleep(self.rng.uniform(0.3, 1.0) * scale)

    def a_committer(self) -> Persistd:
        return self.rng.choice(self.committers)

    def a_path(self) -> Proxy:
        paths = [*self.to_committers, *([self.to_postgres] if self.to_postgres else [])]
        return self.rng.choice(paths)


Nemesis = Callable[[World], Awaitable[None]]


async def kill_committer(world: World) -> None:
    victim = world.a_committer()
    await asyncio.to_thread(victim.kill)
    await asyncio.to_thread(victim.start)


async def pause_committer(world: World) -> None:
    victim = world.a_committer()
    victim.pause()
    try:
        await world.a_while()
    finally:
        victim.resume()


async def kill_postgres(world: World) -> None:
    assert world.postgres is not None
    await asyncio.to_thread(world.postgres.kill)
    await world.a_while(0.3)
    await asyncio.to_thread(world.postgres.start)


async def partition(world: World) -> None:
    """Nothing passes, in one direction or both; then everything that waited does."""
    path = world.a_path()
    path.hold(*world.rng.choice((("up",), ("down",), ("up", "down"))))
    await world.a_while()
    path.restore()


async def drop_replies(world: World) -> None:
    """Requests arrive, replies do not, and never will."""
    path = world.a_path()
    path.hold("down")
    await world.a_while()
    path.cut()
    path.restore()


async def cut_connections(world: World) -> None:
    path = world.a_path()
    for _ in range(3):
        path.cut(refuse=True)
        await world.a_while(0.2)
        path.restore()
        await world.a_while(0.2)


async def delay(world: World) -> None:
    path = world.a_path()
    path.delay_s = world.rng.uniform(0.05, 0.3)
    await world.a_while()
    path.restore()


WITH_POSTGRES: tuple[Nemesis, ...] = (
    kill_committer, pause_committer, kill_postgres, partition, drop_replies, cut_connections, delay,
)  # fmt: skip
WITH_SQLITE: tuple[Nemesis, ...] = tuple(n for n in WITH_POSTGRES if n is not kill_postgres)


async def torment(world: World, nemeses: tuple[Nemesis, ...], seconds: float) -> list[str]:
    """Each nemesis once, then pairs at random until the time is over; what was done."""
    deadline = asyncio.get_running_loop().time() + seconds
    done: list[str] = []
    for nemesis in world.rng.sample(nemeses, len(nemeses)):
        done.append(nemesis.__name__)
        await nemesis(world)
        await world.a_while(0.5)
    while asyncio.get_running_loop().time() < deadline:
        pair = world.rng.sample(nemeses, 2)
        if {kill_committer, pause_committer} != set(pair):  # one ends what the other resumes
            done.append(" + ".join(nemesis.__name__ for nemesis in pair))
            await asyncio.gather(*(nemesis(world) for nemesis in pair))
            await world.a_while()
    return done
