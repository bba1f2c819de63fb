"""A schema bundled from many files validates the same."""

from pathlib import Path
from typing import Any

import pytest

from penstock.catalog.diagnostics import Diagnostics
from penstock.catalog.load import Sources
from penstock.catalog.schema_bundle import RELAXED, WRITE, BuiltSchema, bundle, relaxed
from penstock.model.infer import infer
from penstock.model.reduce import Rule, Strategy
from penstock.model.schema import CompiledSchema
from penstock.model.shape import locate


def built(directory: Path, files: dict[str, str]) -> BuiltSchema:
    """The schema at `schema` of catalog.yaml."""
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    diagnostics = Diagnostics()
    sources = Sources(diagnostics)
    sources.load([directory / "catalog.yaml"])
    schema = bundle(sources.catalogs[0].members["schema"], sources)
    assert [d.render() for d in diagnostics] == []
    assert schema is not None
    return schema


def accepts(schema: BuiltSchema, document: Any) -> bool:  # noqa: ANN401
    return CompiledSchema(schema.value).is_valid(document)


COMMON = """
$defs:
  money: {type: number, minimum: 0}
  line: {type: object, required: [price], properties: {price: {$ref: '#/$defs/money'}}}
  tree: {type: object, properties: {left: {$ref: '#/$defs/tree'}, cost: {$ref: '#Cost'}}}
  cost: {$anchor: Cost, type: integer}
  old: {$id: '#Old', type: boolean}
"""


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        pytest.param("common.yaml#/$defs/money", 1, -1, id="a fragment of a file"),
        pytest.param("common.yaml#/$defs/line", {"price": 1}, {"price": -1}, id="which refers on"),
        pytest.param("common.yaml#Cost", 1, "x", id="an anchor"),
        pytest.param("common.yaml#Old", True, 1, id="an anchor by its id"),
        pytest.param("{$ref: 'common.yaml#Cost', minimum: 5}", 6, 4, id="beside other keywords"),
        pytest.param(
            "common.yaml#/$defs/tree",
            {"left": {"left": {"cost": 1}}},
            {"left": {"left": {"cost": "x"}}},
            id="recursion over members",
        ),
        pytest.param(
            "{$defs: {money: {type: string}}, items: {$ref: 'common.yaml#/$defs/money'}, "
            "contains: {$ref: '#/$defs/money'}, type: array}",
            None,
            [1],
            id="equal names of two files stay apart",
        ),
        pytest.param(
            "{$id: 'https://example.test/a', $defs: {x: {$id: part, type: integer}}, "
            "properties: {n: {$ref: part}, m: {$ref: 'https://example.test/part'}}}",
            {"n": 1, "m": 1},
            {"m": "x"},
            id="parts that are called by their id",
        ),
        pytest.param(
            "{properties: {a: {$ref: '#/$defs/a~1b c'}}, $defs: {'a/b c': {type: integer}}}",
            {"a": 1},
            {"a": "x"},
            id="names that a URL has to escape",
        ),
        pytest.param(
            "{default: {$ref: nowhere}, properties: {$ref: {type: integer}}}",
            {"$ref": 1},
            {"$ref": "x"},
            id="what only looks like a reference",
        ),
    ],
)
def test_a_reference_means_what_it_refers_to(
    tmp_path: Path,
    schema: str,
    good: Any,  # noqa: ANN401
    bad: Any,  # noqa: ANN401
) -> None:
    found = built(tmp_path, {"catalog.yaml": f"schema: {schema}", "common.yaml": COMMON})
    assert good is None or accepts(found, good)
    assert not accepts(found, bad)


def test_only_what_is_referred_to_is_copied(tmp_path: Path) -> None:
    found = built(
        tmp_path,
        {"catalog.yaml": "schema: common.yaml#/$defs/line", "common.yaml": COMMON},
    )
    assert found.value["$defs"] == {"money": {"type": "number", "minimum": 0}}


def test_a_copied_part_is_still_found_where_it_was_written(tmp_path: Path) -> None:
    found = built(
        tmp_path, {"catalog.yaml": "schema: common.yaml#/$defs/line", "common.yaml": COMMON}
    )
    at = found.node_at("/$defs/money/minimum")
    assert (Path(at.at.file).name, at.pointer) == ("common.yaml", "/$defs/money/minimum")
    assert found.node_at("/properties/price/nothing/here").pointer.endswith("/properties/price")


def test_the_draft_of_a_file_goes_with_its_parts(tmp_path: Path) -> None:
    draft = "$schema: http://json-schema.org/draft-07/schema#\n"
    found = built(
        tmp_path, {"catalog.yaml": "schema: common.yaml#Cost", "common.yaml": draft + COMMON}
    )
    assert found.value["$schema"] == "http://json-schema.org/draft-07/schema#"


SIBLINGS = """
  type: object
  properties:
    a:
      $ref: '#/definitions/thing'
      required: [k]
      allOf: [{required: [j]}]
      reduce: {strategy: merge}
    whole: {$ref: '#/definitions/thing'}
  definitions:
    thing: {type: object, properties: {k: {type: integer}, $ref: {type: string}}}
"""


@pytest.mark.parametrize("draft", ["draft-04", "draft-06", "draft-07", "draft/2019-09"])
def test_keywords_beside_a_reference_count_in_every_draft(tmp_path: Path, draft: str) -> None:
    uri = f"http{'s' * (draft == 'draft/2019-09')}://json-schema.org/{draft}/schema"
    found = built(tmp_path, {"catalog.yaml": f"schema:\n  $schema: {uri}{SIBLINGS}"})
    assert accepts(found, {"a": {"k": 1, "j": 2, "$ref": "a member"}, "whole": {}})
    assert not accepts(found, {"a": {"j": 2}})
    assert not accepts(found, {"a": {"k": 1}})
    assert not accepts(found, {"a": {"k": "text", "j": 2}})
    shape, exists = locate(infer(found.value), "/a")
    assert not exists
    assert shape.objects.required("k")
    assert shape.objects.required("j")
    rules = CompiledSchema(found.value).active_rules({"a": {"k": 1, "j": 2}})
    assert rules == {"/a": Rule(strategy=Strategy.MERGE)}
    assert found.node_at("/properties/a/allOf/0/required").value is not None


def test_a_draft_of_the_read_schema_does_not_change_the_write_schema(tmp_path: Path) -> None:
    write = {"catalog.yaml": f"schema:{SIBLINGS}"}
    provided = built(tmp_path, write)
    (tmp_path / "read.yaml").write_text(
        "schema: {$schema: 'http://json-schema.org/draft-07/schema', $ref: 'flow://write-schema'}"
    )
    sources = Sources(Diagnostics())
    sources.load([tmp_path / "read.yaml"])
    read = bundle(sources.catalogs[0].members["schema"], sources, {WRITE: provided})
    assert read is not None
    assert not accepts(read, {"a": {"j": 2}})
    assert accepts(read, {"a": {"k": 1, "j": 2}})


WRITE_SCHEMA = """
type: object
required: [id, name]
properties:
  id: {type: integer}
  name: {type: string, reduce: {strategy: firstWriteWins}, redact: {strategy: sha256}}
  mode: {oneOf: [{type: string}, {type: integer}]}
  next: {$ref: '#/$defs/next'}
not: {required: [forbidden]}
$defs:
  next: {type: string}
"""


def read_schema(directory: Path, read: str) -> BuiltSchema:
    (directory / "catalog.yaml").write_text(f"write: write.yaml\nread: {read}\n")
    (directory / "write.yaml").write_text(WRITE_SCHEMA)
    diagnostics = Diagnostics()
    sources = Sources(diagnostics)
    sources.load([directory / "catalog.yaml"])
    root = sources.catalogs[0]
    write = bundle(root.members["write"], sources)
    assert write is not None
    provided = {WRITE: write, RELAXED: relaxed(write, infer(write.value), ["/id"])}
    schema = bundle(root.members["read"], sources, provided)
    assert [d.render() for d in diagnostics] == []
    assert schema is not None
    return schema


def test_the_write_schema_can_be_extended_for_readers(tmp_path: Path) -> None:
    found = read_schema(tmp_path, f"{{$ref: '{WRITE}', required: [next]}}")
    assert accepts(found, {"id": 1, "name": "x", "next": "y"})
    assert not accepts(found, {"id": 1, "name": "x", "next": 7})
    assert not accepts(found, {"id": 1, "name": "x"})


def test_the_relaxed_schema_keeps_the_key_and_the_annotations(tmp_path: Path) -> None:
    found = read_schema(tmp_path, f"{{$ref: '{RELAXED}'}}")
    assert accepts(found, {"id": 1, "name": 7, "mode": "both", "forbidden": True})
    assert not accepts(found, {"name": "x"})
    assert not accepts(found, {"id": "x"})
    name = infer(found.value).properties["name"].shape
    assert [r.strategy for r in name.reductions] == ["firstWriteWins"]


def test_what_was_redacted_as_it_was_written_is_not_redacted_again_as_it_is_read(
    tmp_path: Path,
) -> None:
    written = infer(read_schema(tmp_path, f"{{$ref: '{WRITE}'}}").value)
    found = infer(read_schema(tmp_path, f"{{$ref: '{RELAXED}'}}").value)
    assert written.properties["name"].shape.redact == "sha256"
    assert found.properties["name"].shape.redact is None


def test_the_inferred_schema_is_open_until_documents_are_seen(tmp_path: Path) -> None:
    found = read_schema(
        tmp_path, f"{{allOf: [{{$ref: '{WRITE}'}}, {{$ref: 'flow://inferred-schema'}}]}}"
    )
    assert found.uses_inferred
    assert accepts(found, {"id": 1, "name": "x"})
