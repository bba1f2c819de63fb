"""`penstock append`: JSON lines into a collection, as one transaction."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import typer

from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.stopping import stops
from penstock.cli.stores import opened
from penstock.errors import UserError
from penstock.servicekit.secrets import mask_url
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.catalog.documents import Refused
    from penstock.catalog.intake import Chunk, Intake
    from penstock.consensus.store import Consensus
    from penstock.journal.journals import Journals
    from penstock.journal.publisher import Publisher
    from penstock.journal.transaction import Intents
    from penstock.model.spec import Catalog

REFUSALS_SHOWN: Final = 20
"""Bad documents that are named; without --skip-invalid, reading ends there."""

STDIN: Final = Path("-")


def append(
    settings: Settings,
    collection: Annotated[str, typer.Argument(help="Name of the collection.", show_default=False)],
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Files of JSON lines; stdin by default, or as -.", show_default=False),
    ] = None,
    skip_invalid: Annotated[
        bool,
        typer.Option("--skip-invalid", help="Append the documents that fit, leave out the others."),
    ] = False,
    redact_salt: Annotated[
        str | None,
        typer.Option(
            "--redact-salt",
            help="Salt of redacted values, in base64; the one of the catalog's tasks by default.",
            envvar="PENSTOCK_REDACT_SALT",
        ),
    ] = None,
) -> None:
    """Append JSON lines as one transaction: readers see all of the documents, or none.

    Documents are validated first. If one does not fit the collection's schema, nothing is appended,
    and every bad line is named with what is wrong with it.

    Example: penstock append acme/orders orders.jsonl
    """
    result = stops.run(_append(settings, collection, files or [STDIN], skip_invalid, redact_salt))
    if settings.json:
        print_json(dataclasses.asdict(result))
        return
    skipped = f"; {result.skipped:,} skipped" if result.skipped else ""
    into = f"{len(result.journals)} journal{'s' if len(result.journals) != 1 else ''}"
    stdout.print(
        f"appended {result.documents:,} document{'s' if result.documents != 1 else ''} "
        f"to {into} of {collection}{skipped}",
        markup=False,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was appended."""

    collection: str
    documents: int
    bytes: int
    """As stored."""
    journals: tuple[str, ...]
    skipped: int
    revision: int | None
    """The store's, at which all of it became visible; None if there was nothing."""


async def _append(
    settings: Settings, name: str, files: list[Path], skip_invalid: bool, redact_salt: str | None
) -> Result:
    from penstock import wall_clock
    from penstock.catalog.intake import Intake
    from penstock.catalog.lookup import find_collection, salt_of
    from penstock.journal.blobs import open_blobs
    from penstock.journal.journals import Journals
    from penstock.journal.ownership import Ownership
    from penstock.journal.publisher import Mapped, Publisher
    from penstock.journal.schemas import Schemas
    from penstock.model.clock import Producer
    from penstock.model.schema import compiled

    async with opened(settings, create=bool(settings.catalog)) as store:
        catalog = await current_catalog(store, settings)
        spec = find_collection(catalog, name)
        schema = compiled(spec.write_schema.text)
        intake = Intake(schema, salt=salt_of(spec, catalog, redact_salt))
        journals, blobs = Journals(store), open_blobs(settings.blob)
        await Ownership(journals, blobs).check()
        publisher = Publisher(
            journals,
            blobs,
            Schemas(store),
            [Mapped(spec=spec)],
            producer=Producer.from_random(os.urandom(6)),
            now=wall_clock.now,
        )
        refusals = Refusals(skip=skip_invalid)
        try:
            await _publish(publisher, intake, files, refusals)
            refusals.check(name)
            intents = await publisher.commit_now()
        except BaseException:
            await publisher.abort()
            raise
        count = publisher.count(0)
        return Result(
            collection=name,
            documents=count.documents,
            bytes=count.bytes,
            journals=intents.journals,
            skipped=refusals.count,
            revision=await _revision(journals, intents) if settings.json else None,
        )


class Refusals:
    """Documents that do not fit: the first ones shown, all of them counted."""

    def __init__(self, *, skip: bool) -> None:
        self.skip = skip
        self.count = 0

    @property
    def enough(self) -> bool:
        """Whether there is no use in reading on."""
        return not self.skip and self.count >= REFUSALS_SHOWN

    def add(self, refused: tuple[Refused, ...]) -> None:
        for each in refused:
            if self.count < REFUSALS_SHOWN:
                stderr.print(each.render(), markup=False)
            elif self.count == REFUSALS_SHOWN and self.skip:
                stderr.print("… and others, which are only counted")
            self.count += 1

    def check(self, collection: str) -> None:
        """Refuse to commit what is not all there."""
        if self.count and not self.skip:
            many = "1 document does" if self.count == 1 else f"{self.count} documents do"
            more = ", and perhaps others" if self.enough else ""
            raise UserError(
                f"nothing was appended: {many} not fit the schema of {collection}{more}",
                fix="correct them, or append the others with --skip-invalid",
            )


async def _publish(
    publisher: Publisher, intake: Intake, files: list[Path], refusals: Refusals
) -> None:
    """Everything that fits, as long as it may still be committed."""
    from penstock.runtime.waiting import in_thread

    with _progress(files) as advance:
        chunks = _chunks(intake, files)
        # Where a stop is heard also while nothing arrives.
        while (chunk := await in_thread(lambda: next(chunks, None))) is not None:
            refusals.add(chunk.refused)
            if refusals.enough:
                return
            if chunk.documents is not None and (refusals.skip or not refusals.count):
                await publisher.publish(0, chunk.documents)
            advance(chunk)


def _chunks(intake: Intake, files: list[Path]) -> Iterator[Chunk]:
    for file in files:
        with _opened(file) as (stream, name):
            yield from intake.read(stream, name)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[tuple[BinaryIO, str]]:
    if file == STDIN:
        yield sys.stdin.buffer, "stdin"
        return
    try:
        with file.open("rb") as stream:
            yield stream, str(file)
    except OSError as error:
        raise UserError(
            f"cannot read {file}; nothing was appended", why=error.strerror or str(error)
        ) from error


@contextlib.contextmanager
def _progress(files: list[Path]) -> Iterator[Any]:
    """A bar on a terminal; how far it goes is known of files only."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    known = all(file != STDIN and file.is_file() for file in files)
    total = sum(file.stat().st_size for file in files) if known else None
    columns = [TextColumn("{task.fields[documents]:,} documents"), BarColumn()]
    with Progress(
        *columns,
        DownloadColumn(),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    ) as progress:
        task = progress.add_task("append", total=total, documents=0)
        documents = 0

        def advance(chunk: Chunk) -> None:
            nonlocal documents
            documents += chunk.documents.num_rows if chunk.documents is not None else 0
            progress.update(task, advance=chunk.bytes, documents=documents)

        yield advance


async def current_catalog(store: Consensus, settings: Settings) -> Catalog:
    """The catalog that was applied last; one that is given is applied first."""
    from penstock.catalog import desired
    from penstock.catalog.build import load_catalog
    from penstock.catalog.evolution import fits_documents
    from penstock.connectors.builtin import locate
    from penstock.runtime.waiting import Waits

    given = None
    if settings.catalog:
        given = load_catalog(settings.catalog, environ=None, locate=locate)
    with Waits().on("this command", f"the consensus store {mask_url(settings.consensus)}"):
        if given is not None:
            await desired.apply(store, given, check=fits_documents(store))
        return await desired.load(store)


async def _revision(journals: Journals, intents: Intents) -> int | None:
    """A writer learns the revision of its commit by reading it back."""
    if not intents:
        return None
    commit = intents.commits[0]
    state = await journals.load(commit.journal)
    return next(
        (
            record.revision
            for record in reversed(state.records)
            if getattr(record, "clock", None) == commit.clock
        ),
        None,
    )
