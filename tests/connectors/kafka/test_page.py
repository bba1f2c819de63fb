"""The page about the connector is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.catalog.build import load_catalog
from penstock.connectors.builtin import BUILTIN, capture
from penstock.connectors.kafka.cluster import CONFIG_SCHEMA
from penstock.connectors.kafka.records import META_MEMBERS
from penstock.connectors.kafka.source import Kafka

PAGE = (Path(__file__).parents[3] / "docs" / "connectors" / "source-kafka.md").read_text()


def test_the_example_is_a_catalog(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "catalog.yaml"
    file.write_text(example)
    catalog = load_catalog([file], environ=None, connectors=BUILTIN)
    (spec,) = catalog.captures
    assert isinstance(capture(spec.endpoint, spec.name), Kafka)


@pytest.mark.parametrize(
    "name",
    [
        *CONFIG_SCHEMA.value["properties"],
        *CONFIG_SCHEMA.value["properties"]["options"]["properties"],
        *CONFIG_SCHEMA.value["properties"]["ssl"]["properties"],
        *CONFIG_SCHEMA.value["properties"]["sasl"]["properties"],
        *Kafka.resource_schema.value["properties"],
        *META_MEMBERS,
    ],
)
def test_the_page_names_every_option(name: str) -> None:
    assert re.search(rf"`(\w+\.)?{re.escape(name)}`", PAGE)
