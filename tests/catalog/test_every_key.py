"""Every key of the grammar has an effect, and something reads what it becomes.

A key that is added to the grammar fails here until it is in `EVERY_KEY`, where removing it must
change what is built or reported. A field that is added to a spec fails until `READ_BY` says which
module reads it. So no key is accepted, recorded, and then forgotten.
"""

import dataclasses
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.catalog.build import BuildResult, build_catalog
from penstock.catalog.forms import Either, Form, Key, KeyedMapping, ListOf, MapOf, Unsupported
from penstock.catalog.grammar import CATALOG
from penstock.connectors.builtin import BUILTIN
from penstock.model import spec as specs

SOURCES = Path(__file__).parents[2] / "src" / "penstock"

EVERY_KEY = """
$schema: https://example.test/catalog.schema.json
import:
  - {url: more.yaml, contentType: JSON_SCHEMA}
collections:
  a/orders: &orders
    key: [/id]
    schema:
      type: object
      required: [id, region]
      properties: {id: {type: integer}, region: {type: string}, total: {type: number}}
    projections: {region: {location: /region, partition: true}, sum: {location: /total}}
    journals: {fragments: {compressionCodec: GZIP, length: 1000, retention: 1d}}
    expectPubId: "1"
  a/two:
    key: [/id]
    writeSchema: &s {type: object, required: [id], properties: {id: {type: integer}}}
    readSchema: {$ref: flow://write-schema}
  a/gone: {key: [/id], schema: *s, delete: true}
  a/lite:
    key: [/id]
    schema: *s
    derive:
      using: {sqlite: {migrations: [create table t (id integer)]}}
      redactSalt: AAAA
      shards: &shards
        disable: true
        minTxnDuration: 2s
        maxTxnDuration: 9s
        logLevel: debug
        flags: {enable-runtime-v2: "true", drop-runtime-v1-rollback: "true"}
        count: 2
        hotStandbys: 1
        ringBufferSize: 1
        readChannelSize: 1
      transforms:
        - name: x
          source: &source
            name: a/orders
            partitions: {include: {region: [eu]}, exclude: {region: [us]}}
            notBefore: "2024-01-01T00:00:00Z"
            notAfter: "2025-01-01T00:00:00Z"
          shuffle: any
          lambda: select $id;
          readDelay: 5s
          priority: 2
          disable: true
          backfill: 1
        - {name: y, source: a/two, shuffle: {key: [/id]}, lambda: select $id;}
  a/spark:
    key: [/id]
    schema: *s
    derive:
      using: {spark: {views: {v: select 1 as n}, nonlinear: allow}}
      shuffleKeyTypes: [integer]
      transforms: [{name: x, source: a/two, shuffle: any, lambda: select id from source}]
  a/python:
    key: [/id]
    schema: *s
    derive:
      using:
        python: &python
          module: |
            class Derivation:
                def x(self, read): yield read
          config: &config {n: 1}
          spec: {configSchema: {type: object, properties: {n: {type: integer}}}}
          dependencies: [attrs]
          batch: true
      transforms: [{name: x, source: a/two}]
  a/project:
    key: [/id]
    schema: *s
    derive:
      using: {python: {files: [pyproject.toml, package/__init__.py]}}
      transforms: [{name: x, source: a/two}]
  a/program:
    key: [/id]
    schema: *s
    derive:
      using: {local: &local {command: [./x], config: *config, env: {A: b}, protobuf: true}}
      shards: {disable: true}
      transforms: [{name: x, source: a/two}]
  a/image:
    key: [/id]
    schema: *s
    derive:
      using: {connector: {image: some/image, config: *config}}
      shards: {disable: true}
      transforms: [{name: x, source: a/two}]
captures:
  a/files:
    endpoint: {connector: {image: penstock/source-files, config: {path: data}}}
    bindings:
      - {resource: {path: a.jsonl}, target: a/orders, onInvalid: skip, backfill: 2}
      - {resource: {path: b.jsonl}, target: a/orders, disable: true}
    renamedFrom: a/before-files
    interval: 9s
    redactSalt: AAAA
    expectPubId: "1"
  a/local:
    endpoint: {local: *local}
    bindings: [{resource: {path: a.jsonl}, target: a/orders}]
    shards: *shards
  a/module:
    endpoint:
      python:
        module: "def read(config, state): yield"
        config: *config
        spec: {configSchema: {type: object, properties: {n: {type: integer}}}}
    bindings: [{resource: {stream: a}, target: a/orders}]
  a/ingest: {endpoint: {ingest: {}}, bindings: [{resource: {path: a}, target: a/orders}]}
  a/old: {endpoint: {ingest: {}}, bindings: [], delete: true}
materializations:
  a/views:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: x.db}}}
    onIncompatibleSchemaChange: abort
    bindings:
      - resource: {table: a}
        source: *source
        fields: {recommended: 1, require: {total: {}}, exclude: [sum], groupBy: [id, region]}
        onIncompatibleSchemaChange: disableTask
        priority: 1
        backfill: 1
        takeover: true
      - resource: {table: b}
        source: a/orders
        disable: true
        renamedFrom: {table: c}
        fields: {include: {total: {}}}
    triggers:
      config:
        - url: https://example.test/
          method: PUT
          headers: {A: b}
          payloadTemplate: "{}"
          timeout: 9s
          maxAttempts: 9
    renamedFrom: a/before
    expectPubId: "1"
  a/program:
    endpoint: {local: *local}
    bindings: [{resource: {table: a}, source: a/orders}]
    shards: *shards
  a/script:
    endpoint: {python: {module: "x = 1", config: *config, spec: {configSchema: {type: object}}}}
    bindings: [{resource: {table: a}, source: a/orders}]
  a/follows: &follows
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: y.db}}}
    source: &followed {capture: a/files, targetNaming: x, deltaUpdates: true, fieldsRecommended: 2}
  a/followed:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: y.db}}}
    sourceCapture: *followed
  a/deleted: {<<: *follows, delete: true}
tests:
  a/steps: &steps
    - capture: {name: a/files, sample: sample.jsonl, description: one}
    - ingest: {collection: a/orders, documents: [{id: 1, region: eu}], description: two}
    - verify:
        collection: {name: a/orders, partitions: &partitions {include: {region: [eu]}}}
        documents: [{id: 1, region: eu}]
        description: three
    - verify: {collection: a/orders, documents: [], partitions: {exclude: {region: [eu]}}}
    - verify:
        collection: {name: a/orders, partitions: {exclude: {region: [eu]}}}
        documents: [{id: 1, region: eu}]
    - verify: {collection: a/orders, documents: [], partitions: *partitions}
  a/described: {description: four, steps: *steps, expectPubId: "1"}
  a/removed: {steps: [], delete: true}
"""

PLAIN = json.dumps(yaml.safe_load(EVERY_KEY))
"""Without aliases, which would share what is changed."""

FILES = {
    "more.yaml": "collections: {}",
    "pyproject.toml": "[project]\nname = 'package'\nversion = '1'\n",
    "package/__init__.py": "class Derivation:\n    def x(self, read): yield read\n",
    "sample.jsonl": '["a/orders", {"id": 1, "region": "eu"}]\n',
}

ALWAYS_SO = {
    "$schema": "for editors",
    "enable-runtime-v2": "all tasks run so",
    "drop-runtime-v1-rollback": "all tasks run so",
    "flags": "what holds for all tasks",
}
"""Keys that ask for nothing, or for what is so anyway."""

NOT_RUN = "catalog/connectors.py: cannot run here"
READ_BY = {
    "Field.name": "runtime/materialize/fields.py: name=field.name",
    "Field.location": "runtime/materialize/fields.py: pointer=field.location",
    "Field.declared": "runtime/materialize/fields.py: field.declared",
    "Field.partition": "model/spec.py: if f.partition",
    "Fragments.codec": "journal/fragments.py: collection.fragments.codec",
    "Fragments.length_bytes": "journal/fragments.py: collection.fragments.length_bytes",
    "Fragments.retention_s": "retention.py: each.fragments.retention_s",
    "CollectionSpec.name": "journal/journals.py: name",
    "CollectionSpec.key": "journal/fragments.py: collection.key",
    "CollectionSpec.write_schema": "journal/fragments.py: collection.write_schema",
    "CollectionSpec.read_schema": "runtime/materialize/fields.py: collection.read_schema",
    "CollectionSpec.reads_inferred": "runtime/capture/build.py: reads_inferred",
    "CollectionSpec.fields": "runtime/materialize/fields.py: collection.fields",
    "CollectionSpec.fragments": "journal/fragments.py: collection.fragments",
    "CollectionSpec.derivation": "runtime/derive/build.py: spec.derivation",
    "FieldValues.field": "journal/selector.py: .field",
    "FieldValues.values": "journal/selector.py: .values",
    "Selector.include": "journal/selector.py: selector.include",
    "Selector.exclude": "journal/selector.py: selector.exclude",
    "Source.collection": "shuffle/binding.py: source.collection",
    "Source.selector": "shuffle/binding.py: binding.source.selector",
    "Source.not_before": "shuffle/binding.py: binding.source.not_before",
    "Source.not_after": "shuffle/binding.py: binding.source.not_after",
    "Shards.disable": "batch.py: shards_of(spec).disable",
    "Shards.min_txn_s": "runtime/materialize/build.py: spec.shards.min_txn_s",
    "Shards.max_txn_s": "runtime/materialize/build.py: spec.shards.max_txn_s",
    "Shards.log_level": "runtime/materialize/build.py: spec.shards.log_level",
    "Shards.count": "runtime/materialize/build.py: spec.shards.count",
    "Endpoint.kind": "connectors/builtin.py: endpoint.kind",
    "Endpoint.config": "connectors/builtin.py: endpoint.config.value",
    "Endpoint.image": "connectors/builtin.py: endpoint.image",
    "Endpoint.command": NOT_RUN,
    "Endpoint.env": NOT_RUN,
    "Endpoint.protobuf": NOT_RUN,
    "Endpoint.module": "connectors/builtin.py: endpoint.module",
    "Endpoint.module_file": "connectors/builtin.py: endpoint.module_file",
    "Endpoint.config_schema": "runtime/derive/python_engine.py: endpoint.config_schema",
    "Transform.name": "shuffle/binding.py: transform.name",
    "Transform.source": "shuffle/binding.py: transform.source",
    "Transform.shuffle": "shuffle/binding.py: transform.shuffle",
    "Transform.shuffle_any": "shuffle/binding.py: transform.shuffle_any",
    "Transform.code": "runtime/derive/sqlite_engine.py: transform.code",
    "Transform.read_delay_s": "shuffle/binding.py: transform.read_delay_s",
    "Transform.priority": "shuffle/binding.py: transform.priority",
    "Transform.disable": "shuffle/binding.py: transform.disable",
    "Transform.backfill": "shuffle/binding.py: transform.backfill",
    "DerivationSpec.using": "runtime/derive/languages.py: derivation.using",
    "DerivationSpec.transforms": "shuffle/binding.py: derivation.transforms",
    "DerivationSpec.shuffle_key_types": "catalog/derivation.py: E-SHUFFLE-TYPES",
    "DerivationSpec.migrations": "runtime/derive/sqlite_engine.py: derivation.migrations",
    "DerivationSpec.views": "runtime/derive/languages.py: derivation.views",
    "DerivationSpec.nonlinear": "runtime/derive/languages.py: derivation.nonlinear",
    "DerivationSpec.endpoint": "runtime/derive/python_engine.py: derivation.endpoint",
    "DerivationSpec.files": "runtime/derive/python_engine.py: derivation.files",
    "DerivationSpec.dependencies": "runtime/derive/python_dependencies.py: dependencies",
    "DerivationSpec.batch": "runtime/derive/python_engine.py: derivation.batch",
    "DerivationSpec.redact_salt": "runtime/derive/target.py: derivation.redact_salt",
    "DerivationSpec.shards": "runtime/derive/build.py: derivation.shards",
    "CaptureBinding.resource": "runtime/capture/build.py: binding.resource",
    "CaptureBinding.target": "runtime/capture/build.py: binding.target",
    "CaptureBinding.on_invalid": "runtime/capture/build.py: binding.on_invalid",
    "CaptureBinding.disable": "runtime/capture/build.py: binding.disable",
    "CaptureBinding.backfill": "runtime/capture/build.py: binding.backfill",
    "CaptureSpec.name": "runtime/capture/build.py: spec.name",
    "CaptureSpec.endpoint": "runtime/capture/build.py: spec.endpoint",
    "CaptureSpec.bindings": "runtime/capture/build.py: spec.bindings",
    "CaptureSpec.interval_s": "runtime/capture/build.py: spec.interval_s",
    "CaptureSpec.redact_salt": "runtime/capture/build.py: spec.redact_salt",
    "CaptureSpec.shards": "runtime/capture/build.py: spec.shards",
    "FieldSelection.recommended_depth": "runtime/materialize/fields.py: .recommended_depth",
    "FieldSelection.require": "runtime/materialize/fields.py: selection.require",
    "FieldSelection.exclude": "runtime/materialize/fields.py: selection.exclude",
    "FieldSelection.group_by": "shuffle/binding.py: binding.fields.group_by",
    "MaterializationBinding.resource": "runtime/materialize/build.py: given.resource",
    "MaterializationBinding.source": "shuffle/binding.py: binding.source",
    "MaterializationBinding.fields": "runtime/materialize/build.py: given.fields",
    "MaterializationBinding.on_incompatible": "",
    "MaterializationBinding.priority": "shuffle/binding.py: binding.priority",
    "MaterializationBinding.disable": "shuffle/binding.py: binding.disable",
    "MaterializationBinding.backfill": "shuffle/binding.py: binding.backfill",
    "MaterializationBinding.takeover": "runtime/materialize/build.py: given.takeover",
    "FollowedCapture.capture": NOT_RUN,
    "FollowedCapture.target_naming": NOT_RUN,
    "FollowedCapture.delta_updates": NOT_RUN,
    "FollowedCapture.recommended_depth": NOT_RUN,
    "Trigger.url": "runtime/triggers.py: hook.url",
    "Trigger.method": "runtime/triggers.py: spec.method",
    "Trigger.headers": "runtime/triggers.py: spec.headers",
    "Trigger.payload_template": "runtime/triggers.py: hook.payload_template",
    "Trigger.timeout_s": "runtime/triggers.py: spec.timeout_s",
    "Trigger.attempts_max": "runtime/triggers.py: spec.attempts_max",
    "Triggers.hooks": "runtime/materialize/build.py: spec.triggers.hooks",
    "MaterializationSpec.name": "runtime/materialize/build.py: spec.name",
    "MaterializationSpec.endpoint": "runtime/materialize/build.py: spec.endpoint",
    "MaterializationSpec.bindings": "runtime/materialize/build.py: spec.bindings",
    "MaterializationSpec.follows": NOT_RUN,
    "MaterializationSpec.on_incompatible": "",
    "MaterializationSpec.triggers": "runtime/materialize/build.py: spec.triggers",
    "MaterializationSpec.renamed_from": "runtime/materialize/build.py: spec.renamed_from",
    "MaterializationBinding.renamed_from": "runtime/materialize/build.py: renamed_from",
    "CaptureSpec.renamed_from": "runtime/capture/build.py: spec.renamed_from",
    "MaterializationSpec.shards": "runtime/materialize/build.py: spec.shards",
    "Step.action": "catalog/testing/run.py: step.action",
    "Step.collection": "catalog/testing/run.py: step.collection",
    "Step.documents": "catalog/testing/run.py: step.documents",
    "Step.selector": "catalog/testing/run.py: step.selector",
    "Step.description": "catalog/testing/run.py: step.description",
    "Step.origin": "catalog/testing/run.py: step.origin",
    "CatalogTest.name": "catalog/testing/report.py: test.name",
    "CatalogTest.description": "catalog/testing/report.py: test.description",
    "CatalogTest.steps": "catalog/testing/run.py: test.steps",
}
"""A field of a spec, and a module with the text by which it reads it."""


def paths(
    form: Form, at: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Key | Unsupported]]:
    """Yield every key of a form with its path; `*` is any name and `#` any item of a list."""
    match form:
        case KeyedMapping():
            for name, key in form.keys.items():
                yield (*at, name), key
                if isinstance(key, Key):
                    yield from paths(key.form, (*at, name))
        case MapOf():
            yield from paths(form.value, (*at, "*"))
        case ListOf():
            yield from paths(form.item, (*at, "#"))
        case Either():
            for each in form.forms:
                yield from paths(each, at)


KEYS = dict(paths(CATALOG))
SECTIONS = ("collections", "captures", "materializations", "tests")


def found(value: Any, path: tuple[str, ...]) -> Iterator[tuple[Any, str]]:  # noqa: ANN401
    """Yield each mapping that holds the last name of a path, and that name."""
    first, *rest = path
    if not rest:
        if isinstance(value, dict):
            yield value, first
    elif first == "*" and isinstance(value, dict):
        for member in value.values():
            yield from found(member, tuple(rest))
    elif first == "#" and isinstance(value, list):
        for item in value:
            yield from found(item, tuple(rest))
    elif isinstance(value, dict) and first in value:
        yield from found(value[first], tuple(rest))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("catalog")
    for name, text in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text(text)
    return place


def every_key() -> Any:  # noqa: ANN401
    return json.loads(PLAIN)


def needed(path: tuple[str, ...]) -> Any:  # noqa: ANN401
    """What a key is in and refers to: the less it is, the sooner it is built."""
    catalog = every_key()
    kept: dict[str, Any] = {"import": catalog["import"]} if path[0] == "import" else {}
    for section, used in (("collections", ("a/orders", "a/two")), ("captures", ("a/files",))):
        kept[section] = {name: catalog[section][name] for name in used}
    for name, definition in catalog[path[0]].items() if path[0] in SECTIONS else ():
        if not path[2:] or any(last in holder for holder, last in found(definition, path[2:])):
            kept.setdefault(path[0], {})[name] = definition
    return kept


def built(directory: Path, catalog: object) -> BuildResult:
    (directory / "catalog.json").write_text(json.dumps(catalog))
    return build_catalog([directory / "catalog.json"], environ={}, connectors=BUILTIN)


def outcome(result: BuildResult) -> object:
    said = [(d.code, d.pointer, d.message) for d in result.diagnostics]
    return specs.fingerprint(result.catalog), said


EFFECTIVE = [
    path
    for path, key in KEYS.items()
    if isinstance(key, Key) and not key.accepted and path[-1] not in ALWAYS_SO
]


@pytest.mark.parametrize("path", EFFECTIVE, ids="/".join)
def test_a_key_changes_what_is_built_or_reported(path: tuple[str, ...], directory: Path) -> None:
    given = [holder for holder, name in found(every_key(), path) if name in holder]
    assert given, f"add {'/'.join(path)} to EVERY_KEY"
    part = needed(path)
    for holder, name in found(part, path):
        holder.pop(name, None)
    changed = outcome(built(directory, part)) != outcome(built(directory, needed(path)))
    assert changed, f"nothing changes without {'/'.join(path)}"


@pytest.mark.parametrize(
    ("path", "key"),
    [(p, key) for p, key in KEYS.items() if isinstance(key, Unsupported)],
    ids=lambda value: "/".join(value) if isinstance(value, tuple) else "",
)
def test_a_key_that_nothing_implements_is_refused(
    path: tuple[str, ...], key: Unsupported, directory: Path
) -> None:
    catalog = every_key()
    holders = list(found(catalog, path))
    assert holders, f"EVERY_KEY has no place for {'/'.join(path)}"
    holder, name = holders[0]
    holder[name] = {}
    assert key.code in {d.code for d in built(directory, catalog).diagnostics}


def test_keys_without_effect_are_named(directory: Path) -> None:
    accepted = {p[-1] for p, key in KEYS.items() if isinstance(key, Key) and key.accepted}
    said = [d.message for d in built(directory, every_key()).diagnostics if d.code == "W-NO-EFFECT"]
    assert all(any(f'"{name}"' in message for message in said) for name in accepted)


def spec_classes(kind: Any) -> Iterator[type]:  # noqa: ANN401
    """Yield the dataclasses of specs in a type, and in their fields."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        yield kind
        for hint in typing.get_type_hints(kind, vars(specs)).values():
            yield from spec_classes(hint)
    for argument in typing.get_args(kind):
        yield from spec_classes(argument)


def test_every_field_of_a_spec_is_read_somewhere() -> None:
    classes = {each.__name__: each for each in spec_classes(specs.Catalog)}
    del classes["Catalog"]
    known = {f"{name}.{f.name}" for name, each in classes.items() for f in dataclasses.fields(each)}
    assert known == set(READ_BY), "say in READ_BY which module reads it"
    for field, reader in READ_BY.items():
        module, _, text = reader.partition(": ")
        if reader:
            assert text in (SOURCES / module).read_text(), f"{field}: {module} has no {text}"


def test_a_key_that_no_builder_looks_at_would_be_found(directory: Path) -> None:
    """The check of the check: `$schema` is such a key."""
    catalog = every_key()
    del catalog["$schema"]
    assert outcome(built(directory, catalog)) == outcome(built(directory, every_key()))
