"""`penstock controller`: keep a cluster at the applied catalog."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.apply import Yes, applied_first, summary
from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.cluster.controller import Controller
    from penstock.cluster.wanted import AppliedCatalog
    from penstock.servicekit.rpc.address import ServiceAddress

_SAY_S: Final = 2.0
"""Nothing is waited for longer without a word."""


def controller(
    settings: Settings,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            help="grpc://HOST:PORT of a cluster; add ?token_file=FILE and &ca=FILE if needed.",
            metavar="URL",
        ),
    ] = "grpc://127.0.0.1:7100",
    yes: Yes = False,
) -> None:
    """Keep a cluster running what the applied catalog defines, until SIGTERM or Ctrl-C.

    It sends everything when it connects, and from then on what changes. It keeps no state: kill it,
    restart it, start it elsewhere. It waits for a cluster that cannot be reached; a cluster keeps
    running its tasks while there is no controller. The newest controller of a cluster takes over,
    and the previous one ends.

    Example: penstock controller --cluster grpc://127.0.0.1:7100
    """
    from penstock.cluster.remote import DEFAULT_PORT
    from penstock.servicekit.rpc.address import ServiceAddress
    from penstock.servicekit.rpc.channel import check_clear

    address = ServiceAddress.parse(cluster, default_port=DEFAULT_PORT)
    check_clear(address)
    stops.run(_control(settings, address, yes=yes))


async def _control(settings: Settings, address: ServiceAddress, *, yes: bool) -> None:
    from penstock.cluster.claim import this_process
    from penstock.cluster.controller import Controller
    from penstock.cluster.remote import RemoteCluster
    from penstock.cluster.wanted import AppliedCatalog

    stopping = asyncio.Event()
    async with opened(settings, create=bool(settings.catalog)) as store:
        if settings.catalog:
            applied = await applied_first(store, settings.catalog, yes=yes)
            stderr.print(summary(applied, dry_run=False), markup=False)
        catalog = AppliedCatalog(store)
        cluster = RemoteCluster(address)
        controller = Controller(catalog, cluster.connect, holder=this_process())
        waits: list[asyncio.Task[Any]] = [
            asyncio.create_task(catalog.follow(), name="catalog"),
            asyncio.create_task(controller.run(), name="controller"),
            asyncio.create_task(stopping.wait(), name="stop"),
        ]
        telling = asyncio.create_task(
            _tell(settings, address, catalog, controller), name="what it waits for"
        )
        try:
            with stops.finishing(stopping.set):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*waits, telling):
                task.cancel()
            results = await asyncio.gather(*waits, telling, return_exceptions=True)
            await cluster.close()
        for result in results:
            if isinstance(result, Exception):
                raise result
        stops.ends_with(0)


async def _tell(
    settings: Settings, address: ServiceAddress, catalog: AppliedCatalog, controller: Controller
) -> None:
    """Say what is waited for, and when the cluster knows everything."""
    serving = asyncio.create_task(controller.initialized())
    try:
        _, late = await asyncio.wait([serving], timeout=_SAY_S)
        if late:
            what = "a catalog: penstock apply" if not catalog.version else f"{address.url}"
            stderr.print(f"waiting for {what}", markup=False)
        await serving
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    if settings.json:
        print_json({"controls": address.url})
    else:
        stdout.print(f"controller of {address.url}", markup=False)
    stdout.file.flush()
