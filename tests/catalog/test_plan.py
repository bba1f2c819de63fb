"""What applying a catalog does, as data."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.catalog.build import load_catalog
from penstock.catalog.desired import ApplyResult, Change, Desired, RemovalRefused, check_removals
from penstock.catalog.desired import plan as changes_of
from penstock.catalog.plan import Difference, Rebuild, differences, in_catalog_keys, planned
from penstock.model import pointer
from penstock.model.json_order import ABSENT, Absent, canonical_json
from penstock.model.spec import Catalog, to_json

CATALOG = """
collections:
  acme/orders:
    key: [/id]
    schema:
      type: object
      required: [id, region]
      properties: {id: {type: integer}, total: {type: number}, region: {type: string}}
    projections: {place: {location: /region, partition: true}}
  acme/sums:
    key: [/id]
    schema: {type: object, required: [id], properties: {id: {type: integer}}}
    derive:
      using: {sqlite: {migrations: ["create table a (id integer primary key)"]}}
      transforms:
        - {name: first, source: acme/orders, shuffle: any, lambda: "select $id as id"}
        - {name: second, source: acme/orders, shuffle: any, lambda: "select $id as id"}
captures:
  acme/files:
    endpoint: {connector: {image: penstock/source-files, config: {path: in}}}
    bindings: [{resource: {path: "*.jsonl"}, target: acme/orders}]
materializations:
  acme/out:
    endpoint:
      connector:
        image: penstock/materialize-postgres
        config: {address: "postgresql://app:hunter2@db/shop", password: hunter2}
    bindings:
      - {resource: {table: orders}, source: acme/orders}
      - {resource: {table: sums}, source: acme/sums}
"""

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "b/c", "~"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "c/d", "~", ""]), inner, max_size=4)
    ),
    max_leaves=12,
)


def patched(before: Any, found: tuple[Difference, ...]) -> Any:  # noqa: ANN401
    """Make every change, as somebody would who reads them."""
    root = {"": copy.deepcopy(before)}
    for difference in found:
        *above, last = ("", *pointer.parse(difference.pointer))
        place: Any = root
        for name in above:
            place = place[name]
        if isinstance(difference.after, Absent):
            del place[last]
        else:
            place[last] = difference.after
    return root[""]


@given(json_values, json_values)
def test_differences_lead_from_one_value_to_the_other_and_back(before: Any, after: Any) -> None:  # noqa: ANN401
    found = differences(before, after)
    assert canonical_json(patched(before, found)) == canonical_json(after)
    back = differences(after, before)
    assert [(at, new, old) for at, old, new in found] == list(back)
    assert bool(found) == (canonical_json(before) != canonical_json(after))


@given(json_values)
def test_a_value_does_not_differ_from_itself(value: Any) -> None:  # noqa: ANN401
    assert differences(value, copy.deepcopy(value)) == ()


def built(directory: Path, text: str = CATALOG) -> Catalog:
    path = directory / "catalog.yaml"
    path.write_text(text)
    return load_catalog([path], environ=None)


def recorded(catalog: Catalog) -> Desired:
    specs = {
        (change.kind, change.name): canonical_json(to_json(change.after))
        for change in changes_of(Desired(), catalog)
    }
    return Desired(version=1, specs=specs)


def changed(directory: Path, *edits: tuple[str, str]) -> tuple[Change, ...]:
    before, text = built(directory), CATALOG
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return changes_of(recorded(before), built(directory, text))


@pytest.mark.parametrize(
    ("old", "new", "keys"),
    [
        pytest.param(
            "total: {type: number}", "total: {type: integer}",
            [("/schema/properties/total/type", "number", "integer")], id="a type",
        ),
        pytest.param(
            "required: [id, region]\n", "required: [id, region, total]\n",
            [("/schema/required", ["id", "region"], ["id", "region", "total"])], id="a list",
        ),
        pytest.param(
            ", partition: true", "",
            [("/projections/place",
              {"location": "/region", "partition": True}, "/region")], id="a partition",
        ),
        pytest.param(
            'lambda: "select $id as id"}\nca', 'lambda: "select 1 as id"}\nca',
            [("/derive/transforms/second/lambda", "select $id as id", "select 1 as id")],
            id="a lambda",
        ),
        pytest.param(
            "{table: sums}, source: acme/sums", "{table: sums}, source: acme/orders",
            [("/bindings/sums/source", "acme/sums", "acme/orders")], id="a source",
        ),
        pytest.param(
            "config: {path: in}", "config: {path: out}",
            [("/endpoint/connector/config/path", "in", "out")], id="a configuration",
        ),
        pytest.param(
            "password: hunter2}", "password: hunter3}",
            [("/endpoint/connector/config/password", "<redacted>", "<redacted>")], id="a secret",
        ),
        pytest.param(
            "hunter2@db", "hunter2@elsewhere",
            [("/endpoint/connector/config/address", "postgresql://app:<redacted>@db/shop",
              "postgresql://app:<redacted>@elsewhere/shop")], id="a secret in an address",
        ),
        pytest.param(
            "    bindings: [{resource: {path: \"*.jsonl\"}",
            "    interval: 10s\n    bindings: [{resource: {path: \"*.jsonl\"}",
            [("/interval", ABSENT, 10)], id="a key that was the default",
        ),
    ],
)  # fmt: skip
def test_a_change_says_which_keys_change(
    tmp_path: Path, old: str, new: str, keys: list[tuple[str, object, object]]
) -> None:
    [change] = changed(tmp_path, (old, new))
    assert list(planned(change).keys) == keys


def test_bindings_that_change_places_do_not_differ(tmp_path: Path) -> None:
    orders = "      - {resource: {table: orders}, source: acme/orders}\n"
    sums = "      - {resource: {table: sums}, source: acme/sums}\n"
    [change] = changed(tmp_path, (orders + sums, sums + orders))
    assert planned(change).keys == ()


def test_bindings_of_one_table_are_all_compared(tmp_path: Path) -> None:
    twice = CATALOG.replace("{table: sums}", "{table: orders, delta: true}")
    spec = built(tmp_path, twice).materializations[0]
    found: Any = in_catalog_keys(spec)
    assert len(found["bindings"]) == 2


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("source: acme/sums}", "source: acme/sums, backfill: 2}", "binding sums"),
        ("target: acme/orders}", "target: acme/orders, backfill: 2}",
         "the source of binding *.jsonl"),
        ("name: first,", "name: first, backfill: 2,", "transform first"),
    ],
)  # fmt: skip
def test_a_raised_backfill_counter_rebuilds(tmp_path: Path, old: str, new: str, what: str) -> None:
    [change] = changed(tmp_path, (old, new))
    assert planned(change).rebuilds == (Rebuild(what, "backfill was 0, and is 2"),)


# ---------------------------------------------------------------------------------------- removals


def result(*changes: Change, files: tuple[str, ...] = ()) -> ApplyResult:
    return ApplyResult(version=2, changes=changes, files_before=files)


def test_tasks_and_collections_are_removed_only_if_allowed(tmp_path: Path) -> None:
    everything = recorded(built(tmp_path))
    applied = result(*changes_of(everything, Catalog()), files=("/a/orders.yaml", "/a/out.yaml"))
    assert [name for _, name in applied.removed] == [
        "acme/orders", "acme/sums", "acme/files", "acme/out",
    ]  # fmt: skip
    with pytest.raises(RemovalRefused) as refused:
        check_removals(applied, ["/a/orders.yaml"], applied.removed[:1])
    assert str(refused.value).splitlines()[:5] == [
        "nothing was applied: this would remove 3 definitions",
        "  derived collection acme/sums",
        "  capture acme/files",
        "  materialization acme/out",
        "  why   the current catalog was also applied from /a/out.yaml",
    ]
    check_removals(applied, ["/a/orders.yaml"], applied.removed)
    check_removals(applied, None, None)


def test_a_derivation_that_is_left_out_is_a_task_that_is_removed(tmp_path: Path) -> None:
    begin = CATALOG.index("    derive:")
    end = CATALOG.index("captures:")
    applied = result(*changed(tmp_path, (CATALOG[begin:end], "")))
    assert [name for _, name in applied.removed] == ["acme/sums"]
    with pytest.raises(RemovalRefused, match="derivation acme/sums"):
        check_removals(applied, None, ())


def test_a_task_that_is_renamed_is_not_removed(tmp_path: Path) -> None:
    applied = result(
        *changed(tmp_path, ("  acme/out:\n", "  acme/views:\n    renamedFrom: acme/out\n"))
    )
    assert [(c.action, c.name) for c in applied.changes] == [
        ("removed", "acme/out"), ("added", "acme/views"),
    ]  # fmt: skip
    assert applied.removed == ()
    assert list(applied.renamed.values()) == ["acme/views"]
