"""The registry of connectors."""

from __future__ import annotations

import importlib

import pytest

from penstock.connectors.builtin import CONNECTORS, materialization
from penstock.connectors.sqlite.sink import Sqlite
from penstock.errors import UserError
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


@pytest.mark.parametrize(
    ("image", "fix"),
    [
        ("penstock/materialise-sqlite", "did you mean penstock/materialize-sqlite?"),
        ("penstock/carrier-pigeon", "use one of these"),
    ],
)
def test_an_image_that_is_not_known_names_those_that_are(image: str, fix: str) -> None:
    with pytest.raises(UserError) as refused:
        materialization(endpoint(image), "acme/views")
    assert refused.value.fix == fix
    assert "penstock/materialize-postgres" in str(refused.value.why)
    assert "materialization acme/views" in str(refused.value.where)
