"""`penstock append`: JSON lines into a collection, as one transaction."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Final

import typer

from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.meanwhile import said_meanwhile
from penstock.cli.stopping import stops
from penstock.cli.stores import current_catalog, opened
from penstock.cli.tables import counted, size_text
from penstock.errors import UserError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.catalog.append import AppendResult
    from penstock.catalog.intake import Chunk, Intake

STDIN: Final = Path("-")


def append(
    settings: Settings,
    collection: Annotated[str, typer.Argument(help="Name of the collection.", show_default=False)],
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files of JSON lines; stdin by default, or given as -.", show_default=False
        ),
    ] = None,
    skip_invalid: Annotated[
        bool,
        typer.Option("--skip-invalid", help="Append the valid documents and skip the others."),
    ] = False,
    redact_salt: Annotated[
        str | None,
        typer.Option(
            "--redact-salt",
            help="Salt for redacted values, in base64; by default, that of the catalog's tasks.",
            envvar="PENSTOCK_REDACT_SALT",
        ),
    ] = None,
) -> None:
    """Append JSON lines as one transaction: readers see all of the documents, or none.

    Documents are validated first. If one does not fit the collection's schema, nothing is appended,
    and every bad line is reported with the reason.

    Example: penstock append acme/orders orders.jsonl
    """
    result = stops.run(_append(settings, collection, files or [STDIN], skip_invalid, redact_salt))
    if settings.json:
        print_json(dataclasses.asdict(result))
        return
    skipped = f"; {result.skipped:,} skipped" if result.skipped else ""
    stdout.print(
        f"appended {counted(result.documents, 'document')} to "
        f"{counted(len(result.journals), 'journal')} of {collection}{skipped}",
        markup=False,
    )


async def _append(
    settings: Settings, name: str, files: list[Path], skip_invalid: bool, redact_salt: str | None
) -> AppendResult:
    from penstock.catalog.append import append_documents
    from penstock.journal.blobs import open_blobs
    from penstock.journal.frame_append import DocumentsRefused
    from penstock.journal.journals import Journals
    from penstock.journal.ownership import Ownership
    from penstock.journal.schemas import Schemas

    async with opened(settings, create=bool(settings.catalog)) as store:
        catalog = await current_catalog(store, settings)
        journals, blobs = Journals(store), open_blobs(settings.blob)
        with _progress(files) as advance:
            try:
                return await append_documents(
                    journals,
                    blobs,
                    Schemas(store),
                    Ownership(journals, blobs),
                    catalog,
                    name,
                    lambda intake: _chunks(intake, files),
                    redact_salt=redact_salt,
                    skip_invalid=skip_invalid,
                    on_refused=lambda text: stderr.print(text, markup=False),
                    on_chunk=advance,
                    with_revision=settings.json,
                )
            except DocumentsRefused as refused:  # each line of it is printed already
                fix = "correct them, or append the others with --skip-invalid"
                raise UserError(refused.what, fix=fix) from None


def _chunks(intake: Intake, files: list[Path]) -> Iterator[Chunk]:
    for file in files:
        with _opened(file) as (stream, name):
            yield from intake.read(stream, name)
    stops.outcome = "all documents were appended, or none: see penstock journals"


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
    """A bar on a terminal, a line now and then elsewhere; the end is known of files only."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    known = all(file != STDIN and file.is_file() for file in files)
    total = sum(file.stat().st_size for file in files) if known else None
    documents = size = 0

    def said() -> str:
        of = "" if total is None else f" of {size_text(total)}"
        return f"appending: {documents:,} documents, {size_text(size)}{of} read"

    columns = [TextColumn("{task.fields[documents]:,} documents"), BarColumn()]
    with (
        said_meanwhile(said),
        Progress(
            *columns,
            DownloadColumn(),
            TimeRemainingColumn(),
            console=stderr,
            transient=True,
            disable=not stderr.is_terminal,
        ) as progress,
    ):
        task = progress.add_task("append", total=total, documents=0)

        def advance(chunk: Chunk) -> None:
            nonlocal documents, size
            size += chunk.bytes
            documents += chunk.documents.num_rows if chunk.documents is not None else 0
            progress.update(task, advance=chunk.bytes, documents=documents)

        yield advance
