"""Collections from schemas, as a catalog builds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from penstock.catalog.build import load_catalog
from penstock.model.json_order import Json
from penstock.model.spec import CollectionSpec


def collection(
    name: str,
    properties: Mapping[str, Json],
    *,
    key: Sequence[str] = ("/id",),
    required: Sequence[str] | None = None,
    projections: Mapping[str, Json] | None = None,
    **schema: Json,
) -> CollectionSpec:
    """A collection of objects with the given properties; its key is required by default."""
    wanted = [part[1:] for part in key if "/" not in part[1:]] if required is None else required
    described = {"type": "object", "required": list(wanted), "properties": dict(properties)}
    spec = {"key": list(key), "schema": {**described, **schema}}
    if projections is not None:
        spec["projections"] = dict(projections)
    with TemporaryDirectory() as directory:
        path = Path(directory) / "catalog.yaml"
        path.write_text(yaml.safe_dump({"collections": {name: spec}}), encoding="utf-8")
        found = load_catalog([path], environ=None).collection(name)
    assert found is not None
    return found
