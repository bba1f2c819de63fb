"""`penstock connector`: which connectors there are, installing packages, and trying endpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock.cli.catalogs import main_files
from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.stopping import stops
from penstock.cli.tables import TableColumn, print_table
from penstock.errors import PenstockError, UsageError, UserError
from penstock.servicekit.secrets import mask
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.model.spec import Catalog
    from penstock.runtime.connector.common import Connector

KAFKA: Final = "kafka"

DESCRIPTIONS: Final[Mapping[str, str]] = {
    "source-files": "files: JSON lines, CSV, Parquet; in a directory or a bucket",
    "source-http-ingest": "documents that others send over HTTP",
    "source-kafka": "topics of Apache Kafka; needs pip install 'penstock[kafka]'",
    "source-postgres": "tables of PostgreSQL: a snapshot, then every change",
    "airbyte": "sources of Airbyte; each needs penstock connector install airbyte:NAME",
    "singer": "Singer taps; each needs penstock connector install singer:NAME",
    "python": "a Python module of yours (endpoint.python), or a dlt resource",
    "materialize-postgres": "tables in PostgreSQL",
    "materialize-sqlite": "tables in an SQLite file",
}
"""By image, protocol, or kind of endpoint."""

_BUILTIN: Final = (TableColumn("KIND"), TableColumn("IMAGE"), TableColumn("WHAT IT IS"))
_INSTALLED: Final = (TableColumn("INSTALLED"), TableColumn("PACKAGE"), TableColumn("VERSION"))


# ------------------------------------------------------------------------------------------- list


def list_connectors(settings: Settings) -> None:
    """List the connectors that a catalog can use, and the packages that are installed.

    Example: penstock connector list
    """
    from penstock.connectors.packages.environments import installed

    found = installed()
    if settings.json:
        print_json(
            {
                "connectors": [
                    {"kind": kind, "image": image, "description": text}
                    for kind, image, text in connectors()
                ],
                "installed": [dataclasses.asdict(each) for each in found],
            }
        )
        return
    print_table(_BUILTIN, connectors())
    if found:
        stdout.print()
        print_table(_INSTALLED, [[each.image, each.distribution, each.version] for each in found])


def connectors() -> Iterator[tuple[str, str, str]]:
    """Yield the kind of task, the image, and what it is, of each connector."""
    from penstock.connectors.builtin import CONNECTORS, PACKAGES

    for name in CONNECTORS["capture"]:
        yield "capture", f"penstock/{name}", DESCRIPTIONS[name]
    for protocol in PACKAGES:
        yield "capture", f"{protocol}:NAME", DESCRIPTIONS[protocol]
    yield "capture", "-", DESCRIPTIONS["python"]
    for name in CONNECTORS["materialization"]:
        yield "materialization", f"penstock/{name}", DESCRIPTIONS[name]


# ---------------------------------------------------------------------------------------- install

_Package = Annotated[
    str, typer.Argument(help="A package, such as airbyte:source-faker.", metavar="PACKAGE")
]


def install(
    settings: Settings,
    package: Annotated[
        str,
        typer.Argument(
            help="airbyte:NAME or singer:NAME, optionally with ==VERSION.",
            metavar="PACKAGE",
        ),
    ],
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Upgrade to the newest version.")
    ] = False,
    beside: Annotated[
        list[str] | None,
        typer.Option("--with", help="An extra requirement for its environment; repeatable."),
    ] = None,
    python: Annotated[
        str, typer.Option("--python", help="The Python of its environment (default: this one).")
    ] = "",
) -> None:
    """Install a source package into its own environment.

    Environments are in ~/.local/share/penstock/connectors (XDG_DATA_HOME). pip runs as it is
    configured on this machine. A package that is already installed is left as it is.

    Example: penstock connector install airbyte:source-faker==7.2.1
    """
    with _progress() as report:
        done = _install(
            package, report, upgrade=upgrade, beside=beside or [], python=python or sys.executable
        )
    if settings.json:
        print_json(done)
    else:
        version = f" {done['version']}" if "version" in done else ""
        stdout.print(f"installed {done['image']}{version} in {done['path']}", markup=False)


def _install(
    name: str, report: Callable[[str], None], *, upgrade: bool, beside: list[str], python: str
) -> dict[str, str]:
    if name == KAFKA:
        raise UsageError(
            "source-kafka is built in, and needs an extra package",
            fix="pip install 'penstock[kafka]'",
        )
    from penstock.connectors.packages import environments

    package = environments.parse(name)
    found = environments.install(package, report, upgrade=upgrade, beside=beside, python=python)
    path = environments.home() / package.directory
    return {"image": found.image, "version": found.version, "path": str(path)}


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Show what is being done: the last of it on a terminal, all of it elsewhere."""
    if not stderr.is_terminal:
        yield lambda text: stderr.print(text, markup=False)
        return
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=stderr,
        transient=True,
    ) as shown:
        task = shown.add_task("")
        yield lambda text: shown.update(task, description=text[: max(20, stderr.width - 20)])


def remove(settings: Settings, package: _Package) -> None:
    """Remove the environment of a package.

    Example: penstock connector remove airbyte:source-faker
    """
    from penstock.connectors.packages import environments

    parsed = environments.parse(package)
    if not environments.remove(parsed):
        raise UserError(
            f"{parsed.image} is not installed", fix="penstock connector list shows what is"
        )
    if settings.json:
        print_json({"removed": parsed.image})
    else:
        stdout.print(f"removed {parsed.image}", markup=False)


# ------------------------------------------------------------------------------------------ check


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Whether an endpoint can be used."""

    kind: str
    task: str
    image: str
    ok: bool
    error: str | None = None


def check(
    settings: Settings,
    catalogs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Catalog files, or directories with a catalog.yaml; ./catalog.yaml by default.",
            show_default=False,
        ),
    ] = None,
    task: Annotated[str, typer.Option("--task", help="Only this task.")] = "",
    allow_outside: Annotated[
        bool,
        typer.Option("--allow-outside", help="Allow files outside the catalog's directory."),
    ] = False,
) -> None:
    """Try to reach the endpoint of every capture and materialization of a catalog.

    Tasks that are disabled are tried only if --task names them.

    Example: penstock connector check catalog.yaml --task acme/orders
    """
    from penstock.catalog.build import load_catalog
    from penstock.connectors.builtin import BUILTIN

    mains = main_files(settings, catalogs, "connector check")
    catalog = load_catalog(
        mains, environ=os.environ, allow_outside=allow_outside, connectors=BUILTIN
    )
    tried = list(_endpoints(catalog, task))
    if task and not tried:
        raise UserError(
            f"there is no capture or materialization {task}",
            fix=f"one of {', '.join(name for _, name, _, _ in _endpoints(catalog, '')) or 'none'}",
        )
    findings = []
    for kind, name, image, connect in tried:
        findings.append(_finding(kind, name, image, connect))
        if not settings.json:
            _print(findings[-1])
    if settings.json:
        print_json(
            {
                "ok": all(each.ok for each in findings),
                "checks": [dataclasses.asdict(each) for each in findings],
            }
        )
    elif not findings:
        stdout.print("the catalog has no endpoint to try")
    if not all(each.ok for each in findings):
        raise typer.Exit(1)


def _endpoints(
    catalog: Catalog, task: str
) -> Iterator[tuple[str, str, str, Callable[[], Connector]]]:
    """Yield the kind, the name, the image and the connector of each task to try."""
    from penstock.connectors.builtin import capture, materialization

    for source in catalog.captures:
        if task in ("", source.name) and (task or not source.shards.disable):
            image = source.endpoint.image or source.endpoint.kind
            connect = functools.partial(capture, source.endpoint, source.name)
            yield "capture", source.name, image, connect
    for sink in catalog.materializations:
        if task in ("", sink.name) and (task or not sink.shards.disable):
            image = sink.endpoint.image or sink.endpoint.kind
            to = functools.partial(materialization, sink.endpoint, sink.name)
            yield "materialization", sink.name, image, to


def _finding(kind: str, name: str, image: str, connect: Callable[[], Connector]) -> Finding:
    try:
        stops.run(_check(connect))
    except PenstockError as error:
        return Finding(kind=kind, task=name, image=image, ok=False, error=mask(str(error)))
    return Finding(kind=kind, task=name, image=image, ok=True)


async def _check(connect: Callable[[], Connector]) -> None:
    from penstock.runtime.waiting import interruptible

    connector = connect()
    await interruptible(connector.check, connector.interrupt)


def _print(finding: Finding) -> None:
    mark = "[green]ok  [/]" if finding.ok else "[red]FAIL[/]"
    stdout.print(mark, end=" ")
    stdout.print(f"{finding.kind} {finding.task} ({finding.image})", markup=False)
    for line in (finding.error or "").splitlines():
        stdout.print(f"       {line}", markup=False)
