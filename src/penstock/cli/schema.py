"""`penstock schema`: the JSON Schema of catalogs."""

from __future__ import annotations

from penstock.cli.frame import print_json
from penstock.settings import Settings


def schema(settings: Settings) -> None:
    """Print the JSON Schema of catalogs, with which editors complete and check YAML.

    It has every key of a catalog, and the configuration of every connector. Write it beside the
    catalog, whose first line is then: # yaml-language-server: $schema=catalog.schema.json

    Example: penstock schema > catalog.schema.json
    """
    from penstock.catalog.editor_schema import editor_schema
    from penstock.connectors.builtin import BUILTIN

    print_json(editor_schema(BUILTIN))
