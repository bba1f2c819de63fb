"""`penstock prepare`: make Spark start faster on this machine."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.tables import size_text
from penstock.errors import Unavailable
from penstock.settings import Settings


def prepare(
    settings: Settings,
    again: Annotated[
        bool, typer.Option("--again", help="Make the archive anew, also if there is one.")
    ] = False,
) -> None:
    """Archive Spark's classes, so that Spark starts and runs its first job in half the time.

    Takes about half a minute, once for each installation, and some 200 MB of disk in the
    environment that Penstock is installed in. It changes no result: an archive that does not fit
    the Java or the Spark that is used is passed over.

    Example: penstock prepare
    """
    from penstock.engine import class_archive, find_java

    archive = class_archive(find_java())
    if again or not archive.exists():
        fresh = archive.with_suffix(".new")
        try:
            archive.parent.mkdir(parents=True, exist_ok=True)
            fresh.unlink(missing_ok=True)
        except OSError as error:
            raise Unavailable(
                f"{archive.parent} cannot be written to",
                why=str(error),
                fix="run it as the owner of this Python environment; or do without: Spark only "
                "starts more slowly",
            ) from None
        with Progress(
            SpinnerColumn(),
            TextColumn("running Spark once, and archiving its classes"),
            TimeElapsedColumn(),
            console=stderr,
            transient=True,
        ) as progress:
            progress.add_task("")
            trained = subprocess.run(  # noqa: S603 - this very interpreter
                [sys.executable, "-m", "penstock.training", str(fresh)],
                capture_output=True,
                text=True,
                check=False,
            )
        if trained.returncode or not fresh.exists():
            raise Unavailable(
                "the archive could not be made",
                why=(trained.stderr.strip().splitlines() or ["the JVM wrote none"])[-1],
                fix="`penstock doctor` checks Java and Spark; without an archive Spark only starts "
                "more slowly",
            )
        fresh.replace(archive)
    size = archive.stat().st_size
    if settings.json:
        print_json({"archive": str(archive), "bytes": size})
    else:
        stdout.print(f"Spark's classes are archived in {archive} ({size_text(size)})", markup=False)
