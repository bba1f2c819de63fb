"""docs/connectors: the configuration and the resource of every connector."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.connectors.builtin import BUILTIN
from penstock.model.config_schema import ConnectorSchemas
from penstock_docs.pages import Region, table

WHAT = re.compile(r"(?P<part>config|resource) of (?P<name>\S+)")


def connectors() -> dict[str, ConnectorSchemas]:
    """Return what each connector accepts, by image, protocol, or kind of endpoint."""
    found: dict[str, ConnectorSchemas] = {}
    for kind in ("capture", "derivation", "materialization"):
        for image in BUILTIN.images(kind):
            schemas = BUILTIN.schemas(kind, image)
            if schemas is not None:
                found[image.removesuffix(":…")] = schemas
    python = BUILTIN.endpoint_schemas("capture", "python")
    return found if python is None else found | {"python": python}


def generate(region: Region) -> str:
    found = WHAT.fullmatch(region.what)
    if found is None or found["name"] not in connectors():
        raise LookupError(f"there is nothing to generate for {region.what!r}")
    schemas = connectors()[found["name"]]
    schema = schemas.config if found["part"] == "config" else schemas.resource
    rows = [*_rows(schema.value, "")]
    return table(("key", "value", "default", "meaning"), rows)


def _rows(schema: Mapping[str, Any], above: str) -> Iterator[tuple[str, ...]]:
    required = schema.get("required", ())
    for name, member in schema.get("properties", {}).items():
        title = _what(member)
        default = "**required**" if name in required else _default(member)
        about = member.get("description", "") + _example(member)
        yield f"`{above}{name}`", title, default, about
        yield from _rows(member, f"{above}{name}.")


def _what(member: Mapping[str, Any]) -> str:
    """Return what a value is. A title has limits after a semicolon."""
    if "enum" in member:
        return f"one of {', '.join(f'`{each}`' for each in member['enum'])}"
    title, _, limits = str(member.get("title", "")).partition("; ")
    return f"{title} ({limits})" if limits else title


def _default(member: Mapping[str, Any]) -> str:
    if "default" not in member:
        return ""
    value = member["default"]
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return f"`{_shown(whole)}`"


def _example(member: Mapping[str, Any]) -> str:
    """Return an example, unless it is only the default."""
    examples = [each for each in member.get("examples", ()) if each != member.get("default")]
    if not examples or isinstance(examples[0], bool):
        return ""
    return f" Example: `{_shown(examples[0])}`"


def _shown(value: Any) -> str:  # noqa: ANN401 - any JSON value
    if not isinstance(value, str):
        return json.dumps(value)
    return value.strip('"') if len(value) > 1 else value
