"""`penstock init`: a small working catalog to start from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import Annotated, Final

import typer

from penstock.cli.frame import print_json, stdout
from penstock.errors import UsageError, UserError
from penstock.settings import Settings

DEMO: Final = "demo"


def init(
    settings: Settings,
    directory: Annotated[
        Path, typer.Argument(help="Directory to write to; created if missing.", metavar="DIR")
    ] = Path(),
    template: Annotated[
        str, typer.Option("--template", help="The template; see --list-templates.")
    ] = DEMO,
    listed: Annotated[
        bool, typer.Option("--list-templates", help="List the templates and write nothing.")
    ] = False,
) -> None:
    """Write a small working catalog with sample data. Never overwrites a file.

    There is one template per kind of source, and that of the demo. The JSON Schema beside the
    catalog lets editors complete and check it: see penstock schema.

    Example: penstock init acme --template files && penstock check acme
    """
    if listed:
        for name in templates():
            stdout.print(name, markup=False)
        return
    if template not in templates():
        raise UsageError(
            f"there is no template {template}", where="--template", fix=", ".join(templates())
        )
    written = write_template(directory, template)
    main = directory / "catalog.yaml"
    if settings.json:
        print_json({"directory": str(directory), "catalog": str(main), "files": written})
        return
    for name in written:
        stdout.print(f"  {directory / name}", markup=False)
    stdout.print("\nNext:", markup=False)
    for command, why in (
        (f"penstock check {main}", "is it valid?"),
        (f"penstock check {main} --explain", "how each member is stored and reduced"),
        ("penstock doctor", "is this machine ready to run it?"),
    ):
        stdout.print(f"  {command:<44} # {why}", markup=False)


def templates() -> list[str]:
    """Return the names of the templates."""
    root = files("penstock.catalog") / "templates"
    return sorted(entry.name for entry in root.iterdir() if (entry / "catalog.yaml").is_file())


def write_template(directory: Path, name: str = DEMO) -> list[str]:
    """Write every file of a template, or none if one of them exists."""
    template = [*_template(name), _editor_schema()]
    taken = [name for name, _ in template if (directory / name).exists()]
    if taken:
        raise UserError(
            f"{directory / taken[0]} already exists",
            why="init never overwrites a file",
            fix="choose an empty directory: penstock init DIR",
        )
    try:
        for name, content in template:
            target = directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                file.write(content)
    except OSError as e:
        raise UserError(
            f"cannot write to {directory}", why=e.strerror or str(e), fix="choose another directory"
        ) from e
    return [name for name, _ in template]


def _template(name: str) -> Iterator[tuple[str, bytes]]:
    root = files("penstock.catalog") / "templates" / name
    pending: list[tuple[PurePosixPath, Traversable]] = [(PurePosixPath(), root)]
    while pending:
        at, place = pending.pop(0)
        for entry in sorted(place.iterdir(), key=lambda e: e.name):
            if entry.is_dir():
                pending.append((at / entry.name, entry))
            else:
                yield str(at / entry.name), entry.read_bytes()


def _editor_schema() -> tuple[str, bytes]:
    """Return the file that the first line of every template names."""
    from penstock.catalog.editor_schema import FILE_NAME, editor_schema
    from penstock.connectors.builtin import BUILTIN

    text = json.dumps(editor_schema(BUILTIN), ensure_ascii=False)
    return FILE_NAME, f"{text}\n".encode()
