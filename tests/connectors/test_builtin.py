"""The registry of connectors."""

from __future__ import annotations

import importlib

import pytest

from penstock.connectors.builtin import BUILTIN, CONNECTORS, materialization
from penstock.connectors.sqlite.sink import Sqlite
from penstock.errors import UserError
from penstock.model.schema_check import check_schema
from penstock.model.spec import Endpoint, Frozen


def endpoint(image: str) -> Endpoint:
    return Endpoint(kind="connector", image=image, config=Frozen({"path": "views.db"}))


@pytest.mark.parametrize(
    "place", [place for named in CONNECTORS.values() for place in named.values()]
)
def test_what_is_registered_exists(place: str) -> None:
    module, _, name = place.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(
    "image", ["penstock/materialize-sqlite", "ghcr.io/x/materialize-sqlite:v1"]
)
def test_an_image_counts_by_its_last_part(image: str) -> None:
    assert isinstance(materialization(endpoint(image), "acme/views"), Sqlite)


def test_an_image_that_is_not_known_names_those_that_are() -> None:
    with pytest.raises(UserError, match="there is no connector penstock/pigeon") as refused:
        materialization(endpoint("penstock/pigeon"), "acme/views")
    assert "penstock/materialize-postgres" in str(refused.value.fix)
    assert "materialization acme/views" in str(refused.value.where)
    assert BUILTIN.schemas("materialization", "penstock/pigeon") is None


@pytest.mark.parametrize("kind", CONNECTORS)
def test_the_schemas_of_a_connector_are_sound_and_fit_their_examples(kind: str) -> None:
    for image in BUILTIN.images(kind):
        schemas = BUILTIN.schemas(kind, image)
        assert schemas is not None
        for schema in (schemas.config, schemas.resource):
            assert [p for p in check_schema(schema.value) if p.code.startswith("E-")] == []
            members = schema.value["properties"]
            assert all(m["title"] and m["description"] and m["examples"] for m in members.values())
            assert schema.problems({n: m["examples"][0] for n, m in members.items()}) == ()
