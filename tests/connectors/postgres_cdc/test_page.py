"""The page about this source is true."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.catalog.build import load_catalog
from penstock.connectors.postgres_cdc.source import PostgresChanges

PAGE = Path(__file__).parents[3] / "docs" / "connectors" / "source-postgres.md"


def test_the_catalog_of_the_page_is_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "catalog.yaml").write_text(example)
    catalog = load_catalog([tmp_path / "catalog.yaml"], environ=None)
    assert [capture.name for capture in catalog.captures] == ["shop/changes"]


def test_the_page_names_every_option() -> None:
    text = PAGE.read_text()
    for schema in (PostgresChanges.config_schema, PostgresChanges.resource_schema):
        assert [name for name in schema.value["properties"] if f"`{name}`" not in text] == []
