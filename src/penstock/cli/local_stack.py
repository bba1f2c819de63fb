"""`penstock local-stack`: consensus, a cluster and its controller, for trying things."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from penstock.cli import child
from penstock.cli.apply import Yes, applied_first, summary
from penstock.cli.cluster import UnifiedRuntime
from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.servicekit.children import Child
from penstock.settings import Settings

_HOST: Final = "127.0.0.1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where each part listens, on loopback: the ports that the parts have by themselves."""

    consensus: int = 6882
    consensus_admin: int = 6883
    cluster: int = 7100
    cluster_admin: int = 7180

    @classmethod
    def free(cls) -> Ports:
        """Ports that nobody has now."""
        with contextlib.ExitStack() as held:
            made = [held.enter_context(socket.socket()) for _ in range(4)]
            for each in made:
                each.bind((_HOST, 0))
            return cls(**dict(zip(cls.__slots__, (s.getsockname()[1] for s in made), strict=True)))


def local_stack(
    settings: Settings,
    catalogs: Annotated[
        list[Path] | None,
        typer.Argument(help="Catalogs to apply first.", show_default=False),
    ] = None,
    free_ports: Annotated[
        bool,
        typer.Option("--free-ports", help="Use free ports instead of the ones below."),
    ] = False,
    unified_runtime: UnifiedRuntime = True,
    yes: Yes = False,
) -> None:
    """Run consensus, a cluster and its controller, each as a process, until Ctrl-C.

    The parts of a deployment on one machine, for trying things out: kill one, and it is restarted.
    Everything listens on loopback: consensus (penstock persistd) at 6882, its admin page at 6883,
    the cluster at 7100, its admin page at 7180. Data is in the usual place (--data).

    Example: penstock local-stack catalog.yaml
    """
    settings = dataclasses.replace(settings, catalog=(*(catalogs or ()), *settings.catalog))
    ports = Ports.free() if free_ports else Ports()
    stops.run(_stack(settings, ports, unified=unified_runtime, yes=yes))


async def _stack(settings: Settings, ports: Ports, *, unified: bool, yes: bool) -> None:
    from penstock.deployment import check_not_lost

    check_not_lost(settings)
    consensus_url = f"grpc://{_HOST}:{ports.consensus}"
    cluster_url = f"grpc://{_HOST}:{ports.cluster}"
    served = dataclasses.replace(settings, consensus=consensus_url)
    listen = ("--listen", f"{_HOST}:{ports.consensus}")
    persistd = child.command(
        "consensus", settings, "persistd", *listen, "--admin-port", str(ports.consensus_admin)
    )
    cluster = child.command(
        "the cluster",
        served,
        "cluster",
        *("--listen", f"{_HOST}:{ports.cluster}"),
        *("--admin-port", str(ports.cluster_admin)),
        "--unified-runtime" if unified else "--no-unified-runtime",
    )
    controller = child.command("the controller", served, "controller", "--cluster", cluster_url)
    children = (persistd, cluster, controller)
    stopping = asyncio.Event()

    def stop() -> None:
        if stopping.is_set():
            for each in children:
                each.signal()
        else:
            stderr.print("stopping; Ctrl-C again to stop at once")
        stopping.set()

    with stops.finishing(stop):
        async with _ended_with(*children), _unless(stopping):
            await persistd.start()
            if settings.catalog:
                async with opened(served, create=True) as store:
                    applied = await applied_first(store, settings.catalog, yes=yes)
                    stderr.print(summary(applied, dry_run=False), markup=False)
            await cluster.start()
            await controller.spawn()  # it has nothing to say before a catalog is applied
            _announce(settings, ports, consensus_url, cluster_url)
            await _kept(*children)
    stops.ends_with(0)


@contextlib.asynccontextmanager
async def _ended_with(*children: Child) -> AsyncIterator[None]:
    """Stop the children when the block ends: those first that need others."""
    try:
        yield
    finally:
        for each in reversed(children):
            await each.stop()


@contextlib.asynccontextmanager
async def _unless(stopping: asyncio.Event) -> AsyncIterator[None]:
    """Run the block until it ends, or until the event is set."""
    leave = asyncio.timeout(None)

    async def watch() -> None:
        await stopping.wait()
        leave.reschedule(0)

    watching = asyncio.create_task(watch())
    try:
        async with leave:
            yield
    except TimeoutError:
        if not leave.expired():
            raise
    finally:
        watching.cancel()


async def _kept(*children: Child) -> None:
    keeping: list[asyncio.Task[Any]] = [asyncio.create_task(each.keep()) for each in children]
    try:
        await asyncio.gather(*keeping)
    finally:
        for each in keeping:
            each.cancel()


def _announce(settings: Settings, ports: Ports, consensus: str, cluster: str) -> None:
    if settings.json:
        admin = f"http://{_HOST}:"
        parts = {
            "consensus": {"listening": consensus, "admin": f"{admin}{ports.consensus_admin}"},
            "cluster": {"listening": cluster, "admin": f"{admin}{ports.cluster_admin}"},
        }
        print_json(parts)
    else:
        for line in _lines(ports, consensus, cluster):
            stdout.print(line, markup=False)
    stdout.file.flush()


def _lines(ports: Ports, consensus: str, cluster: str) -> Iterator[str]:
    yield f"consensus at {consensus} admin http://{_HOST}:{ports.consensus_admin}"
    yield f"cluster at {cluster} admin http://{_HOST}:{ports.cluster_admin}"
    yield f"for example: penstock apply catalog.yaml --consensus {consensus}"
