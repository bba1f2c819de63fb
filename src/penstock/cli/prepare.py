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
    again: Annotated[bool, typer.Option("--again", help="Replace an existing archive.")] = False,
) -> None:
    """Archive Spark's classes, so that Spark starts and runs its first job in half the time.

    It takes about half a minute, once per installation, and about 200 MB of disk in the Python
    environment of Penstock. Results do not change: an archive that does not match the Java or Spark
    in use is ignored.

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
                f"cannot write to {archive.parent}",
                why=str(error),
                fix="run it as the owner of this Python environment; without it, Spark "
                "only starts more slowly",
            ) from None
        with Progress(
            SpinnerColumn(),
            TextColumn("running Spark once to archive its classes"),
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
                "the archive could not be created",
                why=(trained.stderr.strip().splitlines() or ["the JVM wrote no archive"])[-1],
                fix="run penstock doctor to check Java and Spark; without an archive, Spark "
                "only starts more slowly",
            )
        fresh.replace(archive)
    size = archive.stat().st_size
    if settings.json:
        print_json({"archive": str(archive), "bytes": size})
    else:
        stdout.print(f"archived Spark's classes in {archive} ({size_text(size)})", markup=False)
