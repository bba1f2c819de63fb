"""`penstock init`: a small working catalog to start from."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from penstock.cli.frame import print_json, stdout
from penstock.errors import UserError
from penstock.settings import Settings


def init(
    settings: Settings,
    directory: Annotated[
        Path, typer.Argument(help="Directory to write to; created if missing.", metavar="DIR")
    ] = Path(),
) -> None:
    """Write a small working catalog with sample data. Never overwrites a file.

    Example: penstock init demo && penstock check demo
    """
    written = write_template(directory)
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


def write_template(directory: Path) -> list[str]:
    """Write every file of the template, or none if one of them exists."""
    template = list(_template())
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


def _template() -> Iterator[tuple[str, bytes]]:
    root = files("penstock.catalog") / "templates" / "demo"
    pending: list[tuple[PurePosixPath, Traversable]] = [(PurePosixPath(), root)]
    while pending:
        at, place = pending.pop(0)
        for entry in sorted(place.iterdir(), key=lambda e: e.name):
            if entry.is_dir():
                pending.append((at / entry.name, entry))
            else:
                yield str(at / entry.name), entry.read_bytes()
