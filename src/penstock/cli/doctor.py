"""`penstock doctor`: check this machine, and say how to fix what is wrong."""

from __future__ import annotations

import dataclasses
import os
import platform
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn

from penstock.cli.frame import print_json, stderr, stdout
from penstock.errors import PenstockError, Unavailable
from penstock.servicekit.secrets import mask
from penstock.settings import Settings

_DISK_FREE_BYTES_MIN = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check; `fix` is set if it failed."""

    name: str
    ok: bool
    detail: str
    fix: str | None = None


def doctor(settings: Settings) -> None:
    """Check Java, Spark, disk space, permissions, the consensus store and the blob store.

    In a remote blob store, a small object is written, read and deleted.

    Example: penstock doctor --consensus postgresql://app@db/penstock
    """
    findings: list[Finding] = []
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), console=stderr, transient=True
    ) as progress:
        task = progress.add_task("checking")
        for name, check in _CHECKS.items():
            progress.update(task, description=f"checking {name}")
            findings.append(_examine(name, check, settings))
    if settings.json:
        print_json(
            {"ok": all(f.ok for f in findings), "checks": [dataclasses.asdict(f) for f in findings]}
        )
    else:
        for finding in findings:
            mark = "[green]ok  [/]" if finding.ok else "[red]FAIL[/]"
            stdout.print(f"{mark} {finding.name:<12}", end=" ")
            stdout.print(finding.detail, markup=False)
            if finding.fix:
                stdout.print(f"{'':<17} fix: {finding.fix}", markup=False)
    if not all(f.ok for f in findings):
        raise typer.Exit(1)


def _examine(name: str, check: Callable[[Settings], str], settings: Settings) -> Finding:
    try:
        return Finding(name=name, ok=True, detail=mask(check(settings)))
    except PenstockError as e:
        detail = f"{e.what}: {e.why}" if e.why else e.what
        return Finding(name=name, ok=False, detail=mask(detail), fix=mask(e.fix or "") or None)
    except OSError as e:
        return Finding(
            name=name, ok=False, detail=str(e), fix="correct the path or its permissions"
        )


def _python(_: Settings) -> str:
    return f"{platform.python_version()} ({sys.executable})"


def _packages(_: Settings) -> str:
    """pandas 3 installs beside PySpark 4.3, and then fails at run time."""
    pandas = metadata.version("pandas")
    if int(pandas.split(".")[0]) >= 3:
        raise Unavailable(
            f"pandas {pandas} does not work with PySpark",
            fix=f"{sys.executable} -m pip install 'pandas<3'",
        )
    return ", ".join(
        f"{n} {metadata.version(n)}" for n in ("pyspark", "pyarrow", "pandas", "grpcio")
    )


def _java(_: Settings) -> str:
    from penstock.engine import find_java

    java = find_java()
    return f"version {java.version} ({java.executable})"


def _spark(settings: Settings) -> str:
    from penstock.engine import EngineOptions, close_spark, open_spark

    spark = open_spark(EngineOptions(master=settings.master, conf=settings.conf))
    try:
        rows = spark.range(1000).selectExpr("sum(id) AS total").first()
        if rows is None or rows["total"] != 499_500:
            raise Unavailable("Spark returned a wrong sum", why=f"{rows}", fix="reinstall pyspark")
        return f"version {spark.version}, master {settings.master}, a job ran"
    finally:
        close_spark()


def _data_directory(settings: Settings) -> str:
    """Check that it is writable, without creating it: the doctor changes nothing."""
    directory = settings.data.resolve()
    existing = _existing(directory)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise Unavailable(
            f"{existing} is not a writable directory",
            fix="choose another with --data, or change its permissions",
        )
    return f"{directory} {'is writable' if existing == directory else 'can be created'}"


def _existing(path: Path) -> Path:
    """Return the path itself, or the nearest existing directory above it."""
    return next(p for p in (path, *path.parents) if p.exists())


def _disk(settings: Settings) -> str:
    places = {_existing(p) for p in (settings.data.resolve(), Path(tempfile.gettempdir()))}
    reports = []
    for existing in sorted(places):
        free = shutil.disk_usage(existing).free
        if free < _DISK_FREE_BYTES_MIN:
            raise Unavailable(
                f"{existing} has {free / (1 << 20):.0f} MiB free",
                why="Spark's spill files and fragments need space",
                fix="free at least 1 GiB, or point --data and TMPDIR elsewhere",
            )
        reports.append(f"{existing}: {free / (1 << 30):.0f} GiB free")
    return ", ".join(reports)


def _consensus(settings: Settings) -> str:
    from penstock.consensus.open import probe

    return probe(settings.consensus)


def _blob(settings: Settings) -> str:
    """Write, read and remove an object of an object store; a directory is left as it is."""
    from penstock.journal.blobs import open_blobs

    blobs = open_blobs(settings.blob)
    if (directory := blobs.directory) is not None:
        existing = _existing(directory)
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise Unavailable(
                f"{existing} is not a writable directory",
                fix="choose another with --blob, or change its permissions",
            )
        return f"{directory} {'is writable' if existing == directory else 'can be created'}"
    probe, data = f"=doctor/{secrets.token_hex(8)}", secrets.token_bytes(64)
    try:
        blobs.write(probe, data)
        try:
            same = blobs.read(probe) == data
        finally:
            blobs.delete(probe)
    except PenstockError as error:
        raise Unavailable(
            f"{blobs} cannot be written, read and deleted from",
            why=error.why or error.what,
            fix="check the address, the bucket, the region and the credentials of --blob",
        ) from error
    if not same:
        raise Unavailable(f"{blobs} returned other bytes than were written", fix="check the store")
    return f"{blobs}: an object was written, read and deleted"


_CHECKS: dict[str, Callable[[Settings], str]] = {
    "python": _python,
    "packages": _packages,
    "java": _java,
    "spark": _spark,
    "data": _data_directory,
    "disk": _disk,
    "consensus": _consensus,
    "blob": _blob,
}
