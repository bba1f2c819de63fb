"""Valid catalogs, and the specs that they build."""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from penstock.catalog.build import BuildResult, InvalidCatalog, build_catalog, load_catalog
from penstock.model.spec import (
    Catalog,
    FieldSelection,
    FieldValues,
    Fragments,
    Selector,
    Shards,
    Source,
    fingerprint,
    from_json,
    to_json,
)

TEMPLATE = Path(str(files("penstock.catalog") / "templates" / "demo"))

ORDERS = """
collections:
  acme/orders:
    key: [/id]
    schema:
      type: object
      required: [id, region]
      properties:
        id: {type: integer}
        region: {type: string}
        sub: {type: object, properties: {a: {type: number}, b: {type: array}}}
        pair: {type: array, items: [{type: string}, {type: integer}]}
    projections:
      region: {location: /region, partition: true}
      amount: /sub/a
"""


def outcome_of(directory: Path, text: str, **files: str) -> BuildResult:
    (directory / "catalog.yaml").write_text(text, encoding="utf-8")
    for name, content in files.items():
        (directory / name.replace("_", ".")).write_text(content, encoding="utf-8")
    return build_catalog([directory / "catalog.yaml"], environ={"PASSWORD": "hunter2"})


def catalog_of(directory: Path, text: str, **files: str) -> Catalog:
    outcome = outcome_of(directory, text, **files)
    assert [d.render() for d in outcome.diagnostics] == []
    return outcome.catalog


def test_the_template_is_right() -> None:
    outcome = build_catalog([TEMPLATE], environ={})
    assert outcome.diagnostics == ()
    catalog = outcome.catalog
    assert [c.name for c in catalog.collections] == ["shop/customers", "shop/orders", "shop/stock"]
    assert [c.name for c in catalog.derivations] == ["shop/customers"]
    assert [t.name for t in catalog.tests] == ["shop/tests/customers", "shop/tests/stock"]


def test_specs_survive_json() -> None:
    catalog = build_catalog([TEMPLATE], environ={}).catalog
    again = from_json(Catalog, to_json(catalog))
    assert again == catalog
    assert fingerprint(again) == fingerprint(catalog)


def test_fields_are_what_the_schema_names_and_the_catalog_adds(tmp_path: Path) -> None:
    spec = catalog_of(tmp_path, ORDERS).collections[0]
    assert {f.name: f.location for f in spec.fields} == {
        "flow_document": "",
        "flow_published_at": "/_meta/uuid",
        "id": "/id",
        "region": "/region",
        "sub": "/sub",
        "sub/a": "/sub/a",
        "sub/b": "/sub/b",
        "pair": "/pair",
        "pair/0": "/pair/0",
        "pair/1": "/pair/1",
        "amount": "/sub/a",
    }
    assert [f.name for f in spec.partitions] == ["region"]
    assert [f.name for f in spec.fields if f.declared] == ["amount", "region"]


def test_a_fingerprint_is_of_the_meaning_not_of_the_text(tmp_path: Path) -> None:
    first = catalog_of(tmp_path, ORDERS)
    moved = catalog_of(
        tmp_path, "# a comment\n\n" + ORDERS.replace("[id, region]", '["id",region]')
    )
    other = catalog_of(tmp_path, ORDERS.replace("[id, region]", "[region, id, sub]"))
    assert fingerprint(first) == fingerprint(moved)
    assert fingerprint(first) != fingerprint(other)


def test_where_a_step_stands_is_no_part_of_its_fingerprint(tmp_path: Path) -> None:
    test = "tests: {t: [{ingest: {collection: acme/orders, documents: []}}]}\n"
    first = catalog_of(tmp_path, ORDERS + test)
    moved = catalog_of(tmp_path, "\n\n" + ORDERS + test)
    assert first.tests[0].steps[0].origin != moved.tests[0].steps[0].origin
    assert (first, fingerprint(first)) == (moved, fingerprint(moved))


def test_secrets_stay_references(tmp_path: Path) -> None:
    catalog = catalog_of(
        tmp_path,
        """
captures:
  acme/db:
    endpoint: {connector: {image: penstock/source-postgres, config: config.yaml}}
    shards: {disable: true}
    bindings: []
""",
        config_yaml="password: ${env:PASSWORD}\n",
    )
    assert catalog.captures[0].endpoint.config.value == {"password": "${env:PASSWORD}"}
    assert "hunter2" not in repr(to_json(catalog))


def test_every_setting_of_a_task_arrives(tmp_path: Path) -> None:
    catalog = catalog_of(
        tmp_path,
        ORDERS
        + """
    journals:
      fragments:
        compressionCodec: GZIP_OFFLOAD_DECOMPRESSION
        length: 1024
        retention: 2d
materializations:
  acme/views:
    endpoint: {local: {command: [run, it], env: {A: b}, protobuf: true}}
    onIncompatibleSchemaChange: abort
    bindings:
      - resource: {table: a}
        source:
          name: acme/orders
          partitions: {include: {region: [eu, us, eu]}}
          notBefore: 2024-01-31T10:30:00.5+01:00
        fields:
          recommended: 2
          require: {amount: {type: NUMERIC}}
          exclude: [sub]
          groupBy: [region]
        backfill: 3
        priority: 1
      - {resource: {table: b}, source: acme/orders, fields: {recommended: false}, disable: true}
      - {resource: {table: c}, source: acme/orders, onIncompatibleSchemaChange: disableTask}
    shards: {minTxnDuration: 1m 10s, logLevel: debug, count: 4}
""",
    )
    assert catalog.collections[0].fragments == Fragments(
        codec="GZIP", length_bytes=1024, retention_s=172800
    )
    task = catalog.materializations[0]
    first, second, third = task.bindings
    assert task.endpoint.command == ("run", "it")
    assert first.source == Source(
        collection="acme/orders",
        selector=Selector(include=(FieldValues(field="region", values=("eu", "us")),)),
        not_before="2024-01-31T09:30:00.500000Z",
    )
    assert first.fields.recommended_depth == 2
    assert [(name, options.value) for name, options in first.fields.require] == [
        ("amount", {"type": "NUMERIC"})
    ]
    assert (first.fields.exclude, first.fields.group_by) == (("sub",), ("region",))
    assert (first.backfill, first.priority, first.on_incompatible) == (3, 1, "abort")
    assert second.fields == FieldSelection(recommended_depth=0)
    assert second.disable
    assert third.on_incompatible == "disableTask"
    assert task.shards == Shards(
        min_txn_s=70,
        max_txn_s=300,
        log_level="debug",
        count=4,
    )


def test_transforms_shuffle_by_the_key_of_their_source_unless_told(tmp_path: Path) -> None:
    catalog = catalog_of(
        tmp_path,
        ORDERS
        + """
  acme/totals:
    key: [/id]
    schema: {type: object, required: [id], properties: {id: {type: integer}}}
    derive:
      using: {sqlite: {migrations: ["create table t (id integer)", more.sql]}}
      transforms:
        - {name: byKey, source: acme/orders, lambda: lambda.sql, readDelay: 1h}
        - {name: any, source: acme/orders, shuffle: any, lambda: "select $id, $amount, $sub$b;"}
        - {name: own, source: acme/totals, lambda: "select $id;", priority: 2}
        - {name: chosen, source: acme/orders, shuffle: {key: [/id]}, lambda: "select 1 as id;"}
""",
        more_sql="create table more (id integer);",
        lambda_sql="insert into more values ($id) returning id;",
    )
    derivation = catalog.derivations[0].derivation
    assert derivation is not None
    assert derivation.shuffle_key_types == ("integer",)
    assert derivation.migrations == (
        "create table t (id integer)",
        "create table more (id integer);",
    )
    assert [(t.name, t.shuffle, t.shuffle_any) for t in derivation.transforms] == [
        ("byKey", ("/id",), False),
        ("any", ("/id",), True),
        ("own", ("/id",), False),
        ("chosen", ("/id",), False),
    ]
    assert derivation.transforms[0].code == "insert into more values ($id) returning id;"
    assert derivation.transforms[0].read_delay_s == 3600


def test_read_and_write_schemas_may_differ(tmp_path: Path) -> None:
    spec = catalog_of(
        tmp_path,
        """
collections:
  acme/events:
    key: [/id]
    writeSchema: {type: object, required: [id], properties: {id: {type: string}}, x-old: true}
    readSchema: {allOf: [{$ref: flow://relaxed-write-schema}, {$ref: flow://inferred-schema}]}
""",
    ).collections[0]
    assert spec.reads_inferred
    assert spec.write_schema.value["x-old"]
    assert spec.field("id") is not None


def test_a_catalog_in_the_style_of_published_ones_loads_unchanged(tmp_path: Path) -> None:
    catalog = catalog_of(
        tmp_path,
        """
$schema: https://example.test/flow.schema.json
import:
  - inputs.yaml
collections:
  patterns/outer-join:
    schema:
      $ref: schema.yaml#Join
      required: [Key]
    key: [/Key]
    derive:
      using:
        python: { module: join.py }
      shards:
        flags:
          enable-runtime-v2: "true"
      transforms:
        - name: fromInts
          source: { name: patterns/ints }
          shuffle: { key: [/Key] }
        - name: fromStrings
          source: { name: patterns/strings }
          shuffle: { key: [/Key] }
tests:
  "Expect a fully reactive outer join":
    - ingest:
        collection: patterns/ints
        documents: [{ Key: key, Int: 5 }]
    - verify:
        collection: patterns/outer-join
        documents: [{ Key: key, LHS: 5 }]
  patterns/test/described:
    description: The newer form
    steps:
      - ingest: { collection: patterns/strings, documents: strings.json, description: From a file }
""",
        inputs_yaml="""
collections:
  patterns/ints:
    schema: schema.yaml#Int
    key: [/Key]
  patterns/strings:
    schema: schema.yaml#String
    key: [/Key]
""",
        schema_yaml="""
$defs:
  int:
    $anchor: Int
    <<: &shared
      type: object
      required: [Key]
    properties: { Key: { type: string }, Int: { type: integer } }
  string:
    $anchor: String
    <<: *shared
    properties: { Key: { type: string }, String: { type: string } }
  join:
    $anchor: Join
    <<: *shared
    properties:
      Key: { type: string }
      LHS: { type: integer, reduce: { strategy: sum } }
      RHS: { type: array, items: { type: string }, reduce: { strategy: append } }
    reduce: { strategy: merge }
""",
        join_py="class Derivation:\n    def from_ints(self, r): ...\n"
        "    def from_strings(self, r): ...\n",
        strings_json='[{"Key": "a", "String": "b"}]',
    )
    assert [t.name for t in catalog.tests] == [
        "Expect a fully reactive outer join",
        "patterns/test/described",
    ]
    assert catalog.tests[1].steps[0].documents.value == [{"Key": "a", "String": "b"}]


def test_a_reference_to_what_could_not_be_built_is_no_second_mistake(tmp_path: Path) -> None:
    outcome = outcome_of(
        tmp_path,
        """
collections:
  acme/broken: {key: [/id], schema: gone.yaml}
captures:
  acme/files:
    endpoint: {ingest: {}}
    bindings: [{resource: {a: 1}, target: acme/broken}]
tests:
  t: [{ingest: {collection: acme/broken, documents: [{}]}}]
""",
    )
    assert [d.code for d in outcome.diagnostics] == ["E-IMPORT"]


def test_more_members_than_columns_are_warned_of(tmp_path: Path) -> None:
    members = ", ".join(f"m{i}: {{type: integer}}" for i in range(2001))
    outcome = outcome_of(
        tmp_path,
        f"""
collections:
  acme/wide:
    key: [/id]
    schema:
      type: object
      required: [id]
      properties: {{id: {{type: integer}}, many: {{type: object, properties: {{{members}}}}}}}
""",
    )
    assert [d.code for d in outcome.diagnostics] == ["W-WIDE"]
    assert outcome.ok


def test_an_empty_file_is_an_empty_catalog(tmp_path: Path) -> None:
    assert catalog_of(tmp_path, "") == Catalog()


def test_load_catalog_raises_with_every_error(tmp_path: Path) -> None:
    (tmp_path / "catalog.yaml").write_text("colections: {}\ncaptures: 7\n")
    with pytest.raises(InvalidCatalog, match=r"(?s)the catalog has 2 errors.*E-KEY.*E-TYPE"):
        load_catalog([tmp_path], environ={})


def test_checking_many_collections_starts_no_spark(tmp_path: Path) -> None:
    names = "\n".join(f"  acme/c{i}: *c" for i in range(1, 500))
    (tmp_path / "catalog.yaml").write_text(
        "collections:\n  acme/c0: &c\n    key: [/id]\n    schema: {type: object, required: [id], "
        f"properties: {{id: {{type: integer}}}}}}\n{names}\n"
    )
    script = (
        "import sys; from pathlib import Path; from penstock.catalog.build import build_catalog; "
        "o = build_catalog([Path(sys.argv[1])], environ={}); "
        "print(o.ok, len(o.catalog.collections), 'pyspark' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "500", "False"]
