"""`penstock shuffle`: the checkpoints of a task, as they become ready."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.frame import stderr
from penstock.cli.shuffle_service import (
    Listening,
    refuse_beside,
    refuse_without_service,
    serve,
    service_address,
)
from penstock.cli.stopping import stops
from penstock.cli.stores import current_catalog, opened
from penstock.cli.tables import counted, size_text
from penstock.errors import UsageError
from penstock.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.journal.planning import Planner
    from penstock.journal.state import JournalState
    from penstock.model.clock import Clock
    from penstock.model.routing import Routing
    from penstock.model.spec import Catalog
    from penstock.servicekit.rpc.address import ServiceAddress
    from penstock.shuffle.binding import Binding
    from penstock.shuffle.client import RemoteBinding, RemoteSession
    from penstock.shuffle.delivery import Checkpoint
    from penstock.shuffle.session import Session

    Counting = Callable[[Checkpoint], Awaitable[list[int]]]
    """Documents of a checkpoint, shard by shard."""

PATIENCE_S = 5.0
"""Time without a checkpoint after which the reason is printed."""


def shuffle(
    settings: Settings,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", help="A materialization, a derivation, or a collection.", show_default=False
        ),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(
            "--shards",
            min=1,
            help="Number of shards to split the keys over; by default, that of the task.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Keep following new commits; stop with Ctrl-C."),
    ] = False,
    count: Annotated[
        bool,
        typer.Option(
            "--count", help="Also read the documents on Spark, and count those of each shard."
        ),
    ] = False,
    ad_hoc: Annotated[
        bool,
        typer.Option("--ad-hoc", help="Read a derived collection itself, not its sources."),
    ] = False,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Stop after N checkpoints.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Serve sessions to other processes, until SIGTERM; port 0 takes a free one. "
            "Or unix:/PATH.",
        ),
    ] = None,
    service: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="URL",
            help="Follow a service at grpc://HOST:PORT or grpc+unix:///PATH instead of reading "
            "here; stop with Ctrl-C.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            help="With --listen, lines of: NAME CAPABILITIES PREFIX|* SHA256. "
            "With --from, a file with the token itself.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", help="PEM certificate of --listen.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="PEM key of --listen.")] = None,
    tls_ca: Annotated[
        Path | None,
        typer.Option("--tls-ca", help="Trust services of this PEM authority; with --from."),
    ] = None,
) -> None:
    """Print the checkpoints that a task would get from the beginning, one per line.

    A checkpoint is what the task may process next: whole transactions, of all its sources. A peek
    shows a transaction that is not complete yet. Documents are counted from the records of
    journals; --count reads them. It ends when it has caught up with what was there at its start,
    read delays included. Nothing is committed, and the task itself is not affected.

    With --listen it serves such checkpoints to other processes, and --from prints those of a
    service as they become ready. Beyond loopback a service needs TLS and a token file.

    Example: penstock shuffle --name acme/views --shards 4 --count
    """
    reading = {"--name": name, "--shards": shards, "--follow": follow, "--limit": limit}
    here_only = {"--count": count, "--ad-hoc": ad_hoc}
    of_server = {"--tls-cert": tls_cert, "--tls-key": tls_key}
    if listen is not None:
        others = {"--from": service, **reading, **here_only, "--tls-ca": tls_ca}
        refuse_beside("--listen", others, "its clients name what they want")
        serve(
            settings,
            Listening(listen=listen, token_file=token_file, tls_cert=tls_cert, tls_key=tls_key),
        )
        return
    if service is not None:
        others = {**here_only, **of_server}
        refuse_beside("--from", others, "a service sends checkpoints by name, and no documents")
    else:
        refuse_without_service({"--token-file": token_file, **of_server, "--tls-ca": tls_ca})
    if not name:
        raise UsageError(
            "--name is missing",
            fix="name a task or a collection, or serve them all: --listen 127.0.0.1:0",
        )
    printed = _Printed(as_json=settings.json)
    if service is not None:
        address = service_address(service, token_file=token_file, tls_ca=tls_ca)
        work = _shuffle_remote(address, name, printed, shards=shards, limit=limit)
    else:
        work = _shuffle(
            settings,
            name,
            printed,
            shards=shards,
            follow=follow,
            count=count,
            ad_hoc=ad_hoc,
            limit=limit,
        )
    try:
        stops.run(work)
    except KeyboardInterrupt:
        if not follow and service is None:
            raise
    stderr.print(str(printed), markup=False)


async def _shuffle(
    settings: Settings,
    name: str,
    printed: _Printed,
    *,
    shards: int | None,
    follow: bool,
    count: bool,
    ad_hoc: bool,
    limit: int | None,
) -> None:
    from penstock import wall_clock
    from penstock.journal.blobs import open_blobs
    from penstock.journal.journals import Journals
    from penstock.journal.planning import Planner
    from penstock.journal.schemas import Schemas
    from penstock.model.routing import split_shards
    from penstock.shuffle.session import Session

    async with opened(settings, create=bool(settings.catalog)) as store:
        catalog = await current_catalog(store, settings)
        bindings = _bindings(catalog, name, ad_hoc=ad_hoc)
        routing = split_shards(shards or _shards(catalog, name))
        _announce(name, [each.collection.name for each in bindings], len(routing.shards))
        if not bindings:
            return
        planner = Planner(
            journals=Journals(store), blobs=open_blobs(settings.blob), schemas=Schemas(store)
        )
        with _spark(settings) if count else contextlib.nullcontext() as spark:
            session = await Session.open(planner, bindings, now=wall_clock.now)
            try:
                counting = None
                if spark is not None:
                    counting = _counting(spark, planner, bindings, routing, session.states)
                until = None if follow else _head(session.states.values())
                await _print(session, bindings, printed, until, limit, counting)
            finally:
                await session.close()


async def _shuffle_remote(
    address: ServiceAddress,
    name: str,
    printed: _Printed,
    *,
    shards: int | None,
    limit: int | None,
) -> None:
    """Print a service's checkpoints. They are the same for any number of shards."""
    from penstock.shuffle.client import RemoteSession

    session = await RemoteSession.open(address, name)
    try:
        _announce(name, [each.collection for each in session.bindings], shards)
        if session.bindings:
            await _print(session, session.bindings, printed, None, limit)
    finally:
        await session.close()


async def _print(
    session: Session | RemoteSession,
    bindings: Sequence[Binding | RemoteBinding],
    printed: _Printed,
    until: int | None,
    limit: int | None,
    counting: Counting | None = None,
) -> None:
    """Print checkpoints, up to a revision or a number of them."""
    async with contextlib.aclosing(_checkpoints(session, until)) as checkpoints:
        async for checkpoint in checkpoints:
            counted = await counting(checkpoint) if counting else None
            printed.show(checkpoint, bindings, counted)
            if printed.checkpoints == limit:
                return


def _bindings(catalog: Catalog, name: str, *, ad_hoc: bool) -> tuple[Binding, ...]:
    from penstock.catalog.collection_lookup import find_collection
    from penstock.shuffle.binding import ad_hoc_bindings, task_bindings

    if ad_hoc:
        return ad_hoc_bindings(find_collection(catalog, name))
    return task_bindings(catalog, name)


def _shards(catalog: Catalog, name: str) -> int:
    """Number of shards of a task."""
    tasks = {each.name: each.shards for each in catalog.materializations}
    for each in catalog.derivations:
        if each.derivation is not None:
            tasks.setdefault(each.name, each.derivation.shards)
    return (tasks[name].count or 1) if name in tasks else 1


def _announce(name: str, collections: Sequence[str], shards: int | None) -> None:
    if not collections:
        stderr.print(f"{name} reads nothing: all its bindings are disabled", markup=False)
        return
    split = f" for {counted(shards, 'shard')}" if shards else ""
    stderr.print(f"{name} reads {', '.join(dict.fromkeys(collections))}{split}", markup=False)


# ------------------------------------------------------------------------------------ checkpoints


async def _checkpoints(
    session: Session | RemoteSession, until: int | None
) -> AsyncGenerator[Checkpoint]:
    """Yield checkpoints, up to a revision if one is given; after a while, print what is missing."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    if until is not None:
        done = asyncio.ensure_future(session.caught_up(until))
    asking: asyncio.Future[Checkpoint] | None = None
    said = ""
    try:
        while True:
            asking = asking or asyncio.ensure_future(session.next_checkpoint())
            either: list[asyncio.Future[Any]] = [asking, done]
            await asyncio.wait(either, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                checkpoint, asking = asking.result(), None
                yield checkpoint
            elif done.done():
                done.result()
                return
            elif (why := session.waiting_for()) != said:
                stderr.print(why, style="dim", markup=False)
                said = why
    finally:
        await _end(done, *([asking] if asking else []))


async def _end(*futures: asyncio.Future[Any]) -> None:
    """Cancel futures and wait for them; errors that were raised elsewhere already are dropped."""
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


def _head(states: Iterable[JournalState]) -> int:
    """The newest revision at which something was appended to these journals."""
    newest = 0
    for state in states:
        for record in state.records[-1:]:
            newest = max(newest, record.revision)
        for page in state.pages[-1:]:
            newest = max(newest, page.revision_max)
    return newest


# ----------------------------------------------------------------------------------------- output


class _Printed:
    """Totals of what was printed so far."""

    def __init__(self, *, as_json: bool) -> None:
        self.checkpoints = 0
        self.documents = 0
        self.bytes = 0
        self._as_json = as_json

    def show(
        self,
        checkpoint: Checkpoint,
        bindings: Sequence[Binding | RemoteBinding],
        counted: list[int] | None,
    ) -> None:
        """Print one line and flush it."""
        self.checkpoints += 1
        self.documents += checkpoint.documents
        self.bytes += checkpoint.bytes
        described = _describe(self.checkpoints, checkpoint, bindings, counted)
        sys.stdout.write((json.dumps(described) if self._as_json else _line(described)) + "\n")
        sys.stdout.flush()

    def __str__(self) -> str:
        return ", ".join(
            (
                counted(self.checkpoints, "checkpoint"),
                counted(self.documents, "document"),
                size_text(self.bytes),
            )
        )


def _describe(
    number: int,
    checkpoint: Checkpoint,
    bindings: Sequence[Binding | RemoteBinding],
    counted: list[int] | None,
) -> dict[str, Any]:
    """A checkpoint for machines."""
    of_binding = dict.fromkeys((binding.index for binding in bindings), 0)
    for delivery in checkpoint.deliveries:
        of_binding[delivery.binding] += sum(rows.run.rows for rows in delivery.rows)
    described: dict[str, Any] = {
        "number": number,
        "peek": checkpoint.is_peek,
        "unresolved_hints": checkpoint.frontier.unresolved_hints,
        "documents": checkpoint.documents,
        "bytes": checkpoint.bytes,
        "journals": len({delivery.journal for delivery in checkpoint.deliveries}),
        "producers": len({delivery.producer for delivery in checkpoint.deliveries}),
        "committed_at": _time(max((each.commit for each in checkpoint.deliveries), default=None)),
        "bindings": {binding.state_key: of_binding[binding.index] for binding in bindings},
    }
    return described if counted is None else {**described, "shards": counted}


def _line(described: dict[str, Any]) -> str:
    """The same for people."""
    hints = counted(described["unresolved_hints"], "hint")
    parts = [
        f"#{described['number']}",
        f"peek, {hints} unresolved" if described["peek"] else "resolved",
        counted(described["documents"], "document"),
        size_text(described["bytes"]),
        counted(described["journals"], "journal"),
        counted(described["producers"], "producer"),
        f"committed {described['committed_at'] or 'nothing'}",
    ]
    if "shards" in described:
        parts.append(f"by shard {' '.join(f'{n:,}' for n in described['shards'])}")
    return "  ".join(parts)


def _time(clock: Clock | None) -> str | None:
    from penstock.model.clock import to_unix

    if clock is None:
        return None
    seconds, nanos = to_unix(clock)
    moment = datetime.fromtimestamp(seconds, UTC) + timedelta(microseconds=nanos // 1_000)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


# ------------------------------------------------------------------------------------------ Spark


@contextmanager
def _spark(settings: Settings) -> Iterator[SparkSession]:
    from penstock.engine import EngineOptions, close_spark, open_spark

    options = EngineOptions(
        master=settings.master, conf=settings.conf, log_dir=settings.data / "logs"
    )
    with stderr.status("starting Spark"):
        spark = open_spark(options)
    try:
        yield spark
    finally:
        close_spark()


def _counting(
    spark: SparkSession,
    planner: Planner,
    bindings: Sequence[Binding],
    routing: Routing,
    states: Mapping[str, JournalState],
) -> Counting:
    """Counts what arrives in each partition of the exchange, which is a shard."""
    from pyspark.sql import functions as f

    from penstock.shuffle.slice import Slice

    reading = Slice(spark, planner, bindings, routing)

    async def count(checkpoint: Checkpoint) -> list[int]:
        frame = await reading.shuffled(checkpoint.deliveries, states)
        placed = frame.groupBy(f.spark_partition_id().alias("shard")).count()
        job = asyncio.ensure_future(asyncio.to_thread(placed.collect))
        try:
            rows = await asyncio.shield(job)
        except asyncio.CancelledError:
            while not job.done():  # it may be submitted after it was first cancelled
                spark.sparkContext.cancelAllJobs()
                await asyncio.wait([job], timeout=0.2)
            await _end(job)
            raise
        counts = {row["shard"]: row["count"] for row in rows}
        return [counts.get(shard, 0) for shard in range(len(routing.shards))]

    return count
