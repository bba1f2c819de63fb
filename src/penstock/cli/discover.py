"""`penstock discover`: ask an endpoint what it has, and write a catalog file for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os.path import normpath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer
import yaml

from penstock.cli.frame import print_json, stderr, stdout
from penstock.cli.stopping import stops
from penstock.errors import UsageError, UserError
from penstock.settings import Settings

if TYPE_CHECKING:
    from penstock.model.spec import Endpoint
    from penstock.runtime.connector.capture import Capture, Discovered


def discover(
    settings: Settings,
    source: Annotated[
        str,
        typer.Argument(
            help="A connector's image, such as penstock/source-files, or a catalog file.",
            metavar="SOURCE",
        ),
    ],
    config: Annotated[
        Path | None,
        typer.Option("--config", help="A YAML file with the endpoint's configuration."),
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A member of the configuration; repeatable.", metavar="NAME=VALUE"
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", help="Name of the capture; collections are named after its first part."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The file to write; stdout by default.")
    ] = None,
) -> None:
    """List what an endpoint offers, and write a catalog that captures it.

    With an image, this writes a new catalog: a collection for each resource, with a schema and a
    key, and a capture that fills them. Review it before you apply it: schemas are inferred from
    what is there now. With a catalog that has a capture, this writes only the resources that have
    no binding yet. It never overwrites a file.

    Example: penstock discover penstock/source-files --set path=data --out acme.yaml
    """
    from penstock.connectors import builtin

    if out is not None and out.exists():
        raise UsageError(
            f"{out} already exists",
            where="--out",
            fix="choose another file; existing files are never overwritten",
        )
    known: set[str] = set()
    beside = Path.cwd() if out is None else out.absolute().parent
    if source.endswith((".yaml", ".yml", ".json")):
        task, endpoint, known = _of_catalog(Path(source), name)
        beside = Path(source).absolute().parent if out is None else beside
    else:
        task = name or "acme/source"
        endpoint = _endpoint(source, _config(config, values or ()))
    found: list[Discovered] = []
    stops.run(_ask(builtin.capture(endpoint, task), found))
    new = [each for each in found if json.dumps(each.resource, sort_keys=True) not in known]
    for each in new:
        if each.note:
            stderr.print(f"{each.name}: {each.note}", markup=False)
    if not new:
        stderr.print("every resource has a binding already" if known else "nothing was found")
    _write(_catalog(task, endpoint, new, beside), out, len(new), as_json=settings.json)


async def _ask(connector: Capture, found: list[Discovered]) -> None:
    from penstock.runtime.waiting import interruptible

    found += await interruptible(connector.discover, connector.interrupt)


def _write(catalog: dict[str, Any], out: Path | None, count: int, *, as_json: bool) -> None:
    text = yaml.safe_dump(catalog, sort_keys=False, allow_unicode=True, width=100)
    if as_json:
        print_json(catalog)
    elif out is None:
        stdout.print(text, markup=False, highlight=False, soft_wrap=True, end="")
    if out is not None:
        out.write_text(text)
        many = "1 resource" if count == 1 else f"{count} resources"
        stderr.print(f"wrote {out}: {many}; then: penstock check {out}", markup=False)


def _of_catalog(path: Path, name: str | None) -> tuple[str, Endpoint, set[str]]:
    """Return the capture of a catalog, its endpoint, and the resources it has bindings for."""
    from penstock.catalog.build import load_catalog
    from penstock.connectors.builtin import BUILTIN

    captures = load_catalog([path], environ=None, connectors=BUILTIN).captures
    chosen = [spec for spec in captures if name in (None, spec.name)]
    if len(chosen) != 1:
        known = ", ".join(spec.name for spec in captures)
        raise UsageError(
            "the catalog has several captures" if chosen else f"there is no capture {name or ''}",
            where=str(path),
            fix=f"choose one with --name: {known}" if known else "add a capture, or give an image",
        )
    (spec,) = chosen
    bound = {json.dumps(each.resource.value, sort_keys=True) for each in spec.bindings}
    return spec.name, spec.endpoint, bound


def _config(file: Path | None, values: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    if file is not None:
        try:
            loaded = yaml.safe_load(file.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise UserError(
                "the configuration cannot be read", where=str(file), why=str(error)
            ) from None
        if not isinstance(loaded, dict):
            raise UserError("the configuration is not a mapping", where=str(file))
        config = loaded
    for value in values:
        member, equals, text = value.partition("=")
        if not equals:
            raise UsageError(f"{value!r} is not NAME=VALUE", where="--set", fix="--set path=data")
        config[member] = yaml.safe_load(text)
    return config


def _endpoint(image: str, config: dict[str, Any]) -> Endpoint:
    from penstock.model.spec import Endpoint, Frozen

    return Endpoint(kind="connector", image=image, config=Frozen(config))


def _paths_from(config: dict[str, Any], endpoint: Endpoint, beside: Path) -> dict[str, Any]:
    """Return a configuration whose paths are relative to the catalog that it will be part of."""
    from penstock.connectors.builtin import BUILTIN
    from penstock.model import pointer

    schemas = BUILTIN.schemas("capture", endpoint.image or "")
    for at in schemas.config.paths if schemas else ():
        *above, name = pointer.parse(at)
        holder: Any = pointer.get(config, tuple(above))
        path = holder.get(name) if isinstance(holder, dict) else None
        if not isinstance(path, str) or urlsplit(path).scheme or path.startswith("${"):
            continue
        full = Path(normpath(Path.cwd() / path))
        if full.is_relative_to(beside):
            holder[name] = str(full.relative_to(beside))
        elif not Path(path).is_absolute():
            holder[name] = str(full)
    return config


def _catalog(
    task: str, endpoint: Endpoint, found: Sequence[Discovered], beside: Path
) -> dict[str, Any]:
    prefix = task.rpartition("/")[0]
    names = {id(each): f"{prefix}/{each.name}" if prefix else each.name for each in found}
    place: dict[str, Any] = {"config": _paths_from(endpoint.config.value, endpoint, beside)}
    if endpoint.image is not None:
        place = {"image": endpoint.image, **place}
    return {
        "collections": {
            names[id(each)]: {"key": list(each.key), "schema": each.schema} for each in found
        },
        "captures": {
            task: {
                "endpoint": {endpoint.kind: place},
                "bindings": [
                    {
                        "resource": each.resource,
                        "target": names[id(each)],
                        **({"disable": True} if each.disable else {}),
                    }
                    for each in found
                ],
            }
        },
    }
