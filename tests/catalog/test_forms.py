"""The grammar and the JSON Schema that editors get are the same language."""

from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from penstock.catalog.diagnostics import Diagnostics
from penstock.catalog.forms import check, json_schema
from penstock.catalog.grammar import CATALOG
from penstock.catalog.nodes import parse
from penstock.cli.check import editor_schema

TEMPLATE = Path(__file__).parents[2] / "src/penstock/catalog/templates/demo/catalog.yaml"


@pytest.fixture(scope="module")
def editor() -> jsonschema_rs.Validator:
    return jsonschema_rs.Draft201909Validator(editor_schema())


def agrees(editor: jsonschema_rs.Validator, text: str) -> bool:
    """What both say of a catalog."""
    diagnostics = Diagnostics()
    node = parse(text, "f.yaml", diagnostics)
    assert node is not None
    check(node, CATALOG, diagnostics)
    valid: Any = editor.is_valid(node.plain())
    assert valid == diagnostics.ok, [d.render() for d in diagnostics]
    return diagnostics.ok


def test_the_template_is_of_the_language(editor: jsonschema_rs.Validator) -> None:
    assert agrees(editor, TEMPLATE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        pytest.param("{}", True, id="nothing"),
        pytest.param("colections: {}", False, id="an unknown key"),
        pytest.param("endpoints: {}", False, id="a key of an old layout"),
        pytest.param("collections: []", False, id="a list for a mapping"),
        pytest.param("collections: {a: {key: [/id], schema: s.yaml}}", True, id="a schema file"),
        pytest.param("collections: {a: {key: [id], schema: s.yaml}}", False, id="no pointer"),
        pytest.param("collections: {a: {key: [], schema: s.yaml}}", False, id="an empty key"),
        pytest.param("collections: {a: {schema: s.yaml}}", False, id="no key"),
        pytest.param("collections: {/a: {key: [/id], schema: s.yaml}}", False, id="no name"),
        pytest.param("collections: {a/..: {key: [/id], schema: s.yaml}}", False, id="a climb"),
        pytest.param(
            "collections: {a: {key: [/id], writeSchema: s.yaml}}", False, id="half of a pair"
        ),
        pytest.param(
            "collections: {a: {key: [/id], schema: s, writeSchema: s, readSchema: s}}",
            False,
            id="one and the other",
        ),
        pytest.param("captures: {a: {endpoint: {ingest: {}}, bindings: []}}", True, id="ingest"),
        pytest.param("captures: {a: {endpoint: {}, bindings: []}}", False, id="no endpoint"),
        pytest.param(
            "captures: {a: {endpoint: {ingest: {}, python: {module: x}}, bindings: []}}",
            False,
            id="two endpoints",
        ),
        pytest.param(
            "captures: {a: {endpoint: {ingest: {}}, bindings: [], interval: 1h 30m}}",
            True,
            id="a duration",
        ),
        pytest.param(
            "captures: {a: {endpoint: {ingest: {}}, bindings: [], interval: 90}}",
            False,
            id="a number for a duration",
        ),
        pytest.param("tests: {t: [], u: {steps: []}}", True, id="both forms of tests"),
        pytest.param("tests: {t: [{ingest: {}}]}", False, id="a step without members"),
    ],
)
def test_editors_and_the_checker_agree(
    editor: jsonschema_rs.Validator, text: str, right: bool
) -> None:
    assert agrees(editor, text) is right


def test_every_key_says_what_it_is_for() -> None:
    def descriptions(schema: dict[str, Any]) -> list[str]:
        below = [*schema.get("properties", {}).values(), *schema.get("anyOf", [])]
        below += [s for s in (schema.get("items"), schema.get("additionalProperties")) if s]
        shown = [p["description"] for p in schema.get("properties", {}).values()]
        return shown + [d for s in below for d in descriptions(s)]

    shown = descriptions(json_schema(CATALOG))
    assert len(shown) > 150
    assert all(text.endswith(".") for text in shown)


def test_stock_yaml_reads_the_template_alike() -> None:
    text = TEMPLATE.read_text(encoding="utf-8")
    node = parse(text, "f.yaml", Diagnostics())
    stock = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506 - strings only
    assert node is not None
    assert list(node.members) == list(stock)
