"""Editors and `penstock check` speak of the same language."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from penstock.catalog.build import build_catalog
from penstock.catalog.diagnostics import Diagnostics
from penstock.catalog.editor_schema import editor_schema, form_schema, portable
from penstock.catalog.forms import Either, Form, Key, KeyedMapping, ListOf, MapOf, check
from penstock.catalog.grammar import CATALOG
from penstock.catalog.nodes import parse
from penstock.connectors.builtin import BUILTIN
from penstock.model.spec import to_json

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(
    [
        *ROOT.glob("examples/**/*.yaml"),
        *ROOT.glob("src/penstock/catalog/templates/*/catalog.yaml"),
    ]
)
SCHEMA = editor_schema(BUILTIN)
EDITOR = jsonschema_rs.Draft7Validator(SCHEMA)
GRAMMAR = jsonschema_rs.Draft7Validator(
    {**form_schema(CATALOG), "definitions": SCHEMA["definitions"]}
)

RICH: dict[str, Any] = yaml.safe_load("""
$schema: catalog.schema.json
import: [{url: other.yaml, contentType: CATALOG}]
collections:
  a/orders:
    key: [/id]
    schema: {type: object, required: [id, region], reduce: {strategy: merge}, properties: {
      id: {type: integer}, region: {type: string}, total: {type: number, reduce: {strategy: sum}}}}
    projections: {region: {location: /region, partition: true}, t: {location: /total}}
    journals: {fragments: {length: 1000}}
  a/sql:
    key: [/id]
    writeSchema: &s {type: object, required: [id], properties: {id: {type: integer}}}
    readSchema: *s
    derive:
      using: {sqlite: {migrations: [create table t (id integer)]}}
      shards: {flags: {}}
      transforms:
        - name: x
          source: {name: a/orders, partitions: {include: {region: [eu]}}}
          shuffle: {key: [/id]}
          lambda: select $id
  a/spark:
    key: [/id]
    schema: *s
    derive:
      using: {spark: {views: {v: select 1 as id}}}
      transforms: [{name: x, source: a/orders, lambda: select id from source}]
  a/python:
    key: [/id]
    schema: *s
    derive:
      using:
        python:
          dependencies: [numpy]
          module: |
            from a.python import IDerivation

            class Derivation(IDerivation):
                def x(self, read): yield {"id": read.doc.id}
      transforms: [{name: x, source: a/orders}]
captures:
  a/files:
    endpoint: {connector: {image: penstock/source-files, config: {path: data}}}
    bindings: [{resource: {path: "*.jsonl"}, target: a/orders}]
    shards: {}
  a/own:
    endpoint:
      python:
        module: "def read(config, state): yield 'x', {}"
        spec: {configSchema: {type: object}}
    bindings: [{resource: {stream: x}, target: a/orders}]
  a/http:
    endpoint: {ingest: {listen: "127.0.0.1:8780"}}
    bindings: [{resource: {path: orders}, target: a/orders}]
  a/program:
    endpoint: {local: {command: [x], env: {A: b}}}
    bindings: [{resource: {}, target: a/orders}]
    shards: {disable: true}
materializations:
  a/views:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: x.db}}}
    bindings:
      - resource: {table: t}
        source: {name: a/orders, notBefore: "2024-01-01T00:00:00Z"}
        fields: {require: {t: {}}, exclude: [], groupBy: [id]}
    triggers: {config: [{url: "https://example.com", payloadTemplate: p, headers: {h: v}}]}
  a/following:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: y.db}}}
    source: {capture: a/files}
    shards: {disable: true}
tests:
  t: [{ingest: {collection: a/orders, documents: [{id: 1, region: eu}]}}]
  u:
    steps:
      - verify: {collection: {name: a/orders, partitions: {exclude: {region: [us]}}}, documents: []}
      - capture: {name: a/files, sample: sample.jsonl}
""")


def reported(value: object) -> set[str]:
    """The codes of what the grammar alone says against a catalog."""
    diagnostics = Diagnostics()
    node = parse(json.dumps(value), "f.json", diagnostics)
    assert node is not None
    check(node, CATALOG, diagnostics)
    return {found.code for found in diagnostics if found.is_error}


def agree(value: Any) -> bool:  # noqa: ANN401 - any JSON value
    codes = reported(value)
    assert GRAMMAR.is_valid(value) == (not codes), codes
    return not codes


# ------------------------------------------------------------------------------------ whole files


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_every_catalog_that_is_shipped_fits(path: Path) -> None:
    node = parse(path.read_text(encoding="utf-8"), path.name, Diagnostics())
    assert node is not None
    value: Any = node.plain()
    assert [e.message for e in EDITOR.iter_errors(value)] == []
    assert agree(value)


def test_a_rich_catalog_fits() -> None:
    assert agree(RICH)
    assert EDITOR.is_valid(RICH)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        pytest.param("{}", True, id="nothing"),
        pytest.param("colections: {}", False, id="an unknown key"),
        pytest.param("endpoints: {}", False, id="a key of an old layout"),
        pytest.param("collections: []", False, id="a list for a mapping"),
        pytest.param("collections: {a: {key: [/id], schema: s.yaml}}", True, id="a schema file"),
        pytest.param("collections: {grün/été: {key: [/id], schema: s}}", True, id="umlauts"),
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
        pytest.param("tests: {t: {step: []}}", False, id="a misspelt test"),
    ],
)
def test_editors_and_the_checker_agree(text: str, right: bool) -> None:
    assert agree(yaml.safe_load(text)) is right


def test_schemas_of_documents_are_completed_and_checked() -> None:
    def says(schema: dict[str, Any]) -> bool:
        return EDITOR.is_valid({"collections": {"a": {"key": ["/id"], "schema": schema}}})

    strategy = {"properties": {"n": {"reduce": {"strategy": "sum"}}}}
    assert says(strategy)
    assert says({"x-own": 1, "then": {"reduce": {"strategy": "merge", "delete": True}}})
    assert not says({"properties": {"n": {"reduce": {"strategy": "summ"}}}})
    assert not says({"properties": {"n": {"reduce": {}}}})
    assert not says({"items": {"type": "timestamp"}})


# ------------------------------------------------------------------------------------- properties


def members(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:  # noqa: ANN401
    """The paths of everything inside a value."""
    listed = enumerate(value) if isinstance(value, list) else ()
    for name, member in value.items() if isinstance(value, dict) else listed:
        yield (*at, name)
        yield from members(member, (*at, name))


def at_path(value: Any, path: tuple[str | int, ...]) -> Any:  # noqa: ANN401
    for step in path:
        value = value[step]
    return value


PATHS = [(), *members(RICH)]
MAPPINGS = [path for path in PATHS if isinstance(at_path(RICH, path), dict)]


@given(st.sampled_from(MAPPINGS), st.sampled_from(["schemas", "x", "Key", "unknwon"]))
def test_an_unknown_key_is_refused_wherever_the_grammar_refuses_it(
    path: tuple[str | int, ...], name: str
) -> None:
    changed = copy.deepcopy(RICH)
    at_path(changed, path)[name] = {}
    if "E-KEY" in reported(changed):
        assert not GRAMMAR.is_valid(changed)
        assert not EDITOR.is_valid(changed)


VALUES = [None, True, 0, -1, "", "x", "/id", "5m", "a/orders", [], [{}], {}, {"name": "a"}]


@given(st.sampled_from(PATHS[1:]), st.sampled_from([*VALUES, "GONE"]))
def test_whatever_is_changed_both_say_the_same(path: tuple[str | int, ...], value: object) -> None:
    """Except inside of schemas, whose words the grammar leaves to others."""
    changed = copy.deepcopy(RICH)
    above, name = at_path(changed, path[:-1]), path[-1]
    if value == "GONE":
        del above[name]
    else:
        above[name] = value
    if not {"schema", "writeSchema", "readSchema", "configSchema"} & {*path[:-1]}:
        agree(changed)


def keyed(value: Any, form: Form, at: tuple[str | int, ...] = ()) -> Iterator[Any]:  # noqa: ANN401
    """Every mapping with known keys in a value, and its form."""
    match form:
        case Either():
            for each in form.forms:
                yield from keyed(value, each, at)
        case ListOf() if isinstance(value, list):
            for i, item in enumerate(value):
                yield from keyed(item, form.item, (*at, i))
        case MapOf() if isinstance(value, dict):
            for name, member in value.items():
                yield from keyed(member, form.value, (*at, name))
        case KeyedMapping() if isinstance(value, dict):
            yield at, form
            for name, key in form.keys.items():
                if isinstance(key, Key) and name in value:
                    yield from keyed(value[name], key.form, (*at, name))
        case _:
            return


def test_a_default_means_the_same_as_leaving_the_key_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.yaml").write_text("{}")
    Path("sample.jsonl").write_text("")

    def built(catalog: dict[str, Any]) -> object:
        Path("catalog.yaml").write_text(json.dumps(catalog), encoding="utf-8")
        result = build_catalog([Path("catalog.yaml")], environ={}, connectors=BUILTIN)
        assert result.ok, [found.render() for found in result.diagnostics]
        return re.sub(r"catalog\.yaml:\d+", "", json.dumps(to_json(result.catalog)))

    plain = built(RICH)
    tried = set()
    for path, form in keyed(RICH, CATALOG):
        for name, key in form.keys.items():
            if not isinstance(key, Key) or key.default is None or name in at_path(RICH, path):
                continue
            changed = copy.deepcopy(RICH)
            at_path(changed, path)[name] = key.default
            assert built(changed) == plain, (*path, name)
            tried.add((form.what, name))
    assert len(tried) > 25


# ------------------------------------------------------------------------------------- connectors


def materializing(image: str, config: object, resource: object, **rest: object) -> bool:
    endpoint: dict[str, object] = {"connector": {"image": image, "config": config}}
    if config is None:
        endpoint = {"connector": {"image": image}}
    binding = {"resource": resource, "source": "a/orders"}
    task = {"endpoint": endpoint, "bindings": [binding], **rest}
    return EDITOR.is_valid({"materializations": {"a/views": task}})


def test_a_connector_decides_what_its_configuration_is() -> None:
    sqlite, postgres = "penstock/materialize-sqlite", "penstock/materialize-postgres"
    assert materializing(sqlite, {"path": "x.db"}, {"table": "t"})
    assert materializing("ghcr.io/x/materialize-sqlite:v1", {"path": "x.db"}, {"table": "t"})
    assert materializing(sqlite, "config.yaml", {"table": "t"}), "a file"
    assert not materializing(sqlite, None, {"table": "t"})
    assert not materializing(sqlite, {"pth": "x.db"}, {"table": "t"})
    assert not materializing(sqlite, {"path": "x.db", "hardDelete": "yes"}, {"table": "t"})
    assert not materializing(sqlite, {"path": "x.db"}, {"tabel": "t"})
    assert not materializing(sqlite, {"path": "x.db"}, {"table": "SQLite_t"})
    assert not materializing(postgres, {"path": "x.db"}, {"table": "t"})
    address = {"address": "db:5432", "database": "d", "user": "u"}
    assert materializing(postgres, address, {"table": "t", "schema": "s"})
    assert not materializing(postgres, {**address, "sslmode": "always"}, {"table": "t"})
    assert materializing(postgres, {**address, "sslmode": "${env:MODE}"}, {"table": "t"})


def test_an_image_that_no_connector_has_is_refused_unless_the_task_never_runs() -> None:
    assert not materializing("penstock/materialize-nothing", {}, {})
    assert not materializing("penstock/source-files", {"path": "x"}, {"path": "x"})
    assert materializing("materialize-nothing", {}, {}, shards={"disable": True})
    assert materializing("materialize-nothing", {}, {}, delete=True)


@pytest.mark.parametrize("kind", ["capture", "materialization"])
def test_configurations_are_judged_as_by_the_checker(kind: str) -> None:
    section = f"{kind}s"
    for image in BUILTIN.images(kind):
        schemas = BUILTIN.schemas(kind, image)
        assert schemas is not None
        known = schemas.config.value["properties"]
        examples = {name: member["examples"][0] for name, member in known.items()}
        required = {name: examples[name] for name in schemas.config.value["required"]}
        tried = [required, {}, {**required, "unknown": 1}]
        tried += [{**required, name: value} for name, value in examples.items()]
        tried += [{**required, name: value} for name in examples for value in (None, -1, "", [])]
        tried += [{**required, name: "${env:X}"} for name in examples]
        for config in tried:
            endpoint = {"connector": {"image": image, "config": config}}
            task = {"endpoint": endpoint, "bindings": []}
            right = not schemas.config.problems(config)
            assert EDITOR.is_valid({section: {"a": task}}) == right, (image, config)


def test_resources_of_endpoints_without_an_image_are_checked() -> None:
    def capturing(endpoint: object, resource: object) -> bool:
        task = {"endpoint": endpoint, "bindings": [{"resource": resource, "target": "a"}]}
        return EDITOR.is_valid({"captures": {"a": task}})

    assert capturing({"ingest": {}}, {"path": "orders"})
    assert not capturing({"ingest": {"lisen": "x:1"}}, {"path": "orders"})
    assert not capturing({"ingest": {}}, {"stream": "orders"})
    assert capturing({"python": {"module": "x.py"}}, {"stream": "orders"})
    assert not capturing({"python": {"module": "x.py"}}, {"path": "orders"})


# --------------------------------------------------------------------------------- what is printed


def test_every_key_says_what_it_is_for() -> None:
    def descriptions(schema: Any) -> Iterator[str]:  # noqa: ANN401
        if isinstance(schema, list):
            for each in schema:
                yield from descriptions(each)
        if isinstance(schema, dict):
            properties = schema.get("properties", {})
            yield from (p["description"] for p in properties.values() if "if" not in schema)
            for name, each in schema.items():
                yield from descriptions([*each.values()] if name == "properties" else each)

    shown = [*descriptions(form_schema(CATALOG))]
    assert len(shown) > 150
    assert all(text.endswith(".") for text in shown)


def patterns(schema: Any) -> Iterator[str]:  # noqa: ANN401
    if isinstance(schema, dict):
        found = schema.get("pattern")
        if isinstance(found, str):
            yield found
        yield from schema.get("patternProperties", {})
    for each in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(each, dict | list):
            yield from patterns(each)


def test_patterns_are_spelt_for_other_languages() -> None:
    assert portable(r"[\w\-.]+") == r"[\p{L}\p{N}_\-.]+"
    assert portable("^(?!(?i:a_|B))x") == "^(?!(?:[aA]_|[bB]))x"
    written = {*patterns(SCHEMA)}
    assert len(written) > 20
    assert [p for p in written if re.search(r"\\w|\(\?i|\(\?P|\\A|\\Z|\(\?<", p)] == []


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not here")
def test_node_understands_every_pattern() -> None:
    program = "for (const p of JSON.parse(process.argv[1])) new RegExp(p, 'u')"
    given = json.dumps(sorted({*patterns(SCHEMA)}))
    done = subprocess.run(
        ["node", "-e", program, given], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
