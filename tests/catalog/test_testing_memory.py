"""The world of a test: transactions, order, virtual time, cycles, and what documents go through."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from catalog.small_engine import START, SmallEngine, Transform, built, world
from penstock.catalog.testing.contents import DocumentRefused, reduced
from penstock.catalog.testing.graph import Graph
from penstock.catalog.testing.memory import ALL_AT_ONCE, Endless, MemoryWorld, Split
from penstock.errors import UserError
from penstock.model.clock import duration
from penstock.model.json_order import Json
from penstock.model.spec import Catalog, FieldValues, Selector
from penstock.runtime.derive.engine import Document, LambdaFailed

SCHEMA = """
      type: object
      required: [id]
      reduce: {strategy: merge}
      properties:
        id: {type: string}
        n: {type: integer, reduce: {strategy: sum}}
        seen: {type: array, items: {type: string}, reduce: {strategy: append}}
"""
EVENTS = f"""
collections:
  acme/events:
    key: [/id]
    schema: {SCHEMA}
"""


def derived(name: str, *transforms: str) -> str:
    listed = "".join(f"\n        - {{{each}, lambda: select 1 as json}}" for each in transforms)
    return f"""
  {name}:
    key: [/id]
    schema: {SCHEMA}
    derive:
      using: {{sqlite: {{}}}}
      transforms:{listed}
"""


def copy(document: Any, _: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
    yield {"id": document["id"], "n": document.get("n", 0)}


def seen(name: str) -> Transform:
    """Appends what it sees to one document, so that the order of reads can be seen."""

    def see(document: Any, _: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
        yield {"id": "all", "seen": [f"{name}{document['id']}"]}

    return see


def content(some: MemoryWorld, catalog: Catalog, name: str) -> list[Json]:
    spec = catalog.collection(name)
    assert spec is not None
    return reduced(spec, some.read(name, Selector()))


def events(*ids: str) -> list[Document]:
    return [{"id": each, "n": 1} for each in ids]


# --- what a document goes through ---


def test_an_ingested_transaction_is_combined_by_key(tmp_path: Path) -> None:
    catalog = built(tmp_path, EVENTS)
    here = world(catalog, tmp_path, {})
    here.ingest("acme/events", events("a", "b", "a"))
    assert here.read("acme/events", Selector()) == [{"id": "a", "n": 2}, {"id": "b", "n": 1}]
    here.ingest("acme/events", events("a"))
    assert len(here.read("acme/events", Selector())) == 3
    assert content(here, catalog, "acme/events") == [{"id": "a", "n": 3}, {"id": "b", "n": 1}]


@pytest.mark.parametrize(
    "reduction",
    [
        pytest.param("{strategy: merge, associative: false}", id="it is not associative"),
        pytest.param("{strategy: lastWriteWins, delete: true}", id="it deletes"),
    ],
)
def test_documents_that_cannot_be_combined_stay_apart(tmp_path: Path, reduction: str) -> None:
    catalog = built(
        tmp_path,
        EVENTS.replace("{strategy: merge}", reduction, 1)
        .replace(", reduce: {strategy: sum}", "")
        .replace(", reduce: {strategy: append}", ""),
    )
    here = world(catalog, tmp_path, {})
    here.ingest("acme/events", events("a", "a"))
    assert len(here.read("acme/events", Selector())) == 2


def test_what_ends_in_a_deletion_is_not_there(tmp_path: Path) -> None:
    catalog = built(
        tmp_path,
        """
collections:
  acme/events:
    key: [/id]
    schema:
      type: object
      required: [id]
      properties: {id: {type: string}, gone: {type: boolean}}
      if: {required: [gone]}
      then: {reduce: {strategy: merge, delete: true}}
      else: {reduce: {strategy: merge}}
""",
    )
    here = world(catalog, tmp_path, {})
    here.ingest("acme/events", [{"id": "a"}, {"id": "b"}, {"id": "a", "gone": True}])
    assert content(here, catalog, "acme/events") == [{"id": "b"}]


def test_a_document_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    here = world(built(tmp_path, EVENTS), tmp_path, {})
    with pytest.raises(DocumentRefused, match=r"schema of acme/events: /n: .*\n  where document 1"):
        here.ingest("acme/events", [{"id": "a"}, {"id": "a", "n": "x"}])


def test_what_a_derivation_publishes_is_validated(tmp_path: Path) -> None:
    catalog = built(tmp_path, EVENTS + derived("acme/copies", "name: copy, source: acme/events"))
    here = world(catalog, tmp_path, {"acme/copies": [lambda document, _: [{"n": document["n"]}]]})
    here.ingest("acme/events", events("a"))
    with pytest.raises(DocumentRefused, match="/id: is required") as raised:
        here.settle()
    assert raised.value.where == (
        'derivation acme/copies, transform copy, document ["a"] of acme/events'
    )


def test_a_number_that_no_column_holds_is_refused(tmp_path: Path) -> None:
    here = world(built(tmp_path, EVENTS), tmp_path, {})
    with pytest.raises(DocumentRefused, match="does not fit 64 bits"):
        here.ingest("acme/events", [{"id": "a", "n": 2**70}])


def test_a_lambda_that_raises_names_its_document(tmp_path: Path) -> None:
    catalog = built(tmp_path, EVENTS + derived("acme/copies", "name: copy, source: acme/events"))

    def divide(document: Any, _: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
        yield {"id": str(1 / (document["n"] - 7))}

    here = world(catalog, tmp_path, {"acme/copies": [divide]})
    here.ingest("acme/events", [{"id": "a", "n": 1}, {"id": "b", "n": 7}])
    with pytest.raises(LambdaFailed) as raised:
        here.settle()
    assert raised.value.where == 'line 1, document ["b"] of acme/events'


def test_redacted_values_are_not_stored(tmp_path: Path) -> None:
    catalog = built(
        tmp_path,
        """
collections:
  acme/people:
    key: [/id]
    schema:
      type: object
      required: [id]
      properties:
        id: {type: string}
        mail: {type: string, redact: {strategy: sha256}}
        note: {type: string, redact: {strategy: block}}
""",
    )
    here = world(catalog, tmp_path, {})
    here.ingest("acme/people", [{"id": "a", "mail": "a@b.c", "note": "x"}])
    (document,) = here.read("acme/people", Selector())
    assert str(document["mail"]).startswith("sha256:")
    assert "note" not in document


def test_what_the_read_schema_refuses_is_not_read(tmp_path: Path) -> None:
    catalog = built(
        tmp_path,
        """
collections:
  acme/events:
    key: [/id]
    writeSchema: {type: object, required: [id], properties: {id: {type: string}}}
    readSchema:
      type: object
      required: [id, n]
      properties: {id: {type: string}, n: {type: integer}}
""",
    )
    here = world(catalog, tmp_path, {})
    here.ingest("acme/events", [{"id": "a"}])
    with pytest.raises(DocumentRefused, match="does not fit its readSchema: /n: is required"):
        here.read("acme/events", Selector())


# --- which reads, in which order ---


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        pytest.param(
            ["name: x, source: acme/events", "name: y, source: acme/others"],
            ["xa", "xb", "yc"],
            id="by clock",
        ),
        pytest.param(
            ["name: x, source: acme/events", "name: y, source: acme/others, priority: 1"],
            ["yc", "xa", "xb"],
            id="by priority first",
        ),
        pytest.param(
            ["name: x, source: acme/events", "name: y, source: acme/events"],
            ["xa", "ya", "xb", "yb"],
            id="in the order of transforms, for one document",
        ),
        pytest.param(
            ["name: x, source: acme/events, disable: true", "name: y, source: acme/others"],
            ["yc"],
            id="disabled transforms read nothing",
        ),
        pytest.param(
            ["name: x, source: {name: acme/events, notBefore: 2026-02-01T00:00:00Z}"],
            [],
            id="not before",
        ),
        pytest.param(
            ["name: x, source: {name: acme/events, notAfter: 2026-02-01T00:00:00Z}"],
            ["xa", "xb"],
            id="not after",
        ),
    ],
)
def test_the_order_of_reads(tmp_path: Path, transforms: list[str], expected: list[str]) -> None:
    others = EVENTS.replace("collections:\n", "").replace("acme/events", "acme/others")
    catalog = built(tmp_path, EVENTS + others + derived("acme/seen", *transforms))
    here = world(catalog, tmp_path, {"acme/seen": [seen("x"), seen("y")]})
    here.ingest("acme/events", events("a", "b"))
    here.ingest("acme/others", events("c"))
    here.settle()
    found = content(here, catalog, "acme/seen")
    assert found == ([{"id": "all", "seen": expected}] if expected else [])


def test_a_disabled_derivation_does_not_run(tmp_path: Path) -> None:
    text = EVENTS + derived("acme/seen", "name: x, source: acme/events")
    catalog = built(
        tmp_path, text.replace("{sqlite: {}}", "{sqlite: {}}\n      shards: {disable: true}")
    )
    here = world(catalog, tmp_path, {})
    here.ingest("acme/events", events("a"))
    here.settle()
    assert content(here, catalog, "acme/seen") == []


def test_partitions_select_what_is_read_and_verified(tmp_path: Path) -> None:
    text = EVENTS + "    projections: {id: {location: /id, partition: true}}\n"
    source = "name: x, source: {name: acme/events, partitions: {exclude: {id: [b]}}}"
    catalog = built(tmp_path, text + derived("acme/seen", source))
    here = world(catalog, tmp_path, {"acme/seen": [seen("x")]})
    here.ingest("acme/events", events("a", "b", "c"))
    here.settle()
    assert content(here, catalog, "acme/seen") == [{"id": "all", "seen": ["xa", "xc"]}]
    chosen = Selector(include=(FieldValues(field="id", values=("b", "c")),))
    assert [each["id"] for each in here.read("acme/events", chosen)] == ["b", "c"]


def test_state_is_kept_by_shard_from_transaction_to_transaction(tmp_path: Path) -> None:
    def running(document: Any, state: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
        state[document["id"]] = state.get(document["id"], 0) + document["n"]
        yield {"id": document["id"], "seen": [str(state[document["id"]])]}

    catalog = built(tmp_path, EVENTS + derived("acme/totals", "name: x, source: acme/events"))
    engine = SmallEngine([running])
    here = MemoryWorld(
        catalog, directory=tmp_path, start=START, shards=3, engines=lambda *_: engine
    )
    for _ in range(3):
        here.ingest("acme/events", events(*"abcdef"))
        here.settle()
    assert content(here, catalog, "acme/totals") == [
        {"id": each, "seen": ["1", "2", "3"]} for each in "abcdef"
    ]
    assert {context.shard for context in engine.opened} == {0, 1, 2}
    assert {context.shards for context in engine.opened} == {3}
    here.close()


# --- virtual time ---


def test_a_delayed_read_waits_until_the_time_is_advanced(tmp_path: Path) -> None:
    catalog = built(
        tmp_path,
        EVENTS
        + derived("acme/late", "name: x, source: acme/events, readDelay: 24h")
        + derived("acme/later", "name: x, source: acme/late, readDelay: 1h")
        + derived("acme/other", "name: x, source: acme/events, readDelay: 1h"),
    )
    engines: dict[str, list[Transform]] = {
        name: [copy] for name in ("acme/late", "acme/later", "acme/other")
    }
    here = world(catalog, tmp_path, engines)
    here.ingest("acme/events", events("a"))
    here.settle()
    assert not any(content(here, catalog, name) for name in engines)
    assert not here.advance_to_next_due("acme/events"), "nothing could still write it"
    assert here.advance_to_next_due("acme/later")
    here.settle()
    assert here.now - START >= duration(24 * 3600)
    assert content(here, catalog, "acme/late")
    assert content(here, catalog, "acme/other")
    assert not content(here, catalog, "acme/later"), "its own read is delayed once more"
    assert here.advance_to_next_due("acme/later")
    here.settle()
    assert here.now - START >= duration(25 * 3600)
    assert content(here, catalog, "acme/later")
    assert not here.advance_to_next_due("acme/later")


def test_delays_order_reads_by_the_time_at_which_they_are_due(tmp_path: Path) -> None:
    catalog = built(
        tmp_path,
        EVENTS
        + derived(
            "acme/seen",
            "name: x, source: acme/events, readDelay: 1m",
            "name: y, source: acme/events",
        ),
    )
    here = world(catalog, tmp_path, {"acme/seen": [seen("x"), seen("y")]})
    here.ingest("acme/events", events("a"))
    here.settle()
    here.ingest("acme/events", events("b"))
    here.settle()
    while here.advance_to_next_due("acme/seen"):
        here.settle()
    here.ingest("acme/events", events("c"))
    here.settle()
    assert content(here, catalog, "acme/seen") == [
        {"id": "all", "seen": ["ya", "yb", "xa", "xb", "yc"]}
    ]


# --- cycles ---


LEDGER = (
    "name: request, source: acme/events, shuffle: any",
    "name: own, source: acme/ledger, shuffle: any",
)


def countdown(document: Any, _: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
    if document["n"] > 0:
        yield {"id": f"{document['id']}.", "n": document["n"] - 1}


@pytest.mark.parametrize("split", [ALL_AT_ONCE, Split(name="one by one", largest=1)], ids=str)
def test_a_derivation_that_reads_itself_runs_until_it_rests(tmp_path: Path, split: Split) -> None:
    catalog = built(tmp_path, EVENTS + derived("acme/ledger", *LEDGER))
    here = world(catalog, tmp_path, {"acme/ledger": [copy, countdown]}, split=split)
    here.ingest("acme/events", [{"id": "a", "n": 3}, {"id": "b", "n": 1}])
    here.settle()
    assert content(here, catalog, "acme/ledger") == [
        {"id": "a", "n": 3},
        {"id": "a.", "n": 2},
        {"id": "a..", "n": 1},
        {"id": "a...", "n": 0},
        {"id": "b", "n": 1},
        {"id": "b.", "n": 0},
    ]


def test_a_long_chain_is_no_endless_one(tmp_path: Path) -> None:
    catalog = built(tmp_path, EVENTS + derived("acme/ledger", *LEDGER))
    split = Split(name="one by one", largest=1)
    here = world(catalog, tmp_path, {"acme/ledger": [copy, countdown]}, split=split)
    for i in range(20):
        here.ingest("acme/events", [{"id": str(i), "n": 100}])
    here.settle()
    assert len(content(here, catalog, "acme/ledger")) == 20 * 101


@pytest.mark.parametrize("delay", ["0s", "1h"])
def test_a_cycle_that_does_not_rest_is_named(tmp_path: Path, delay: str) -> None:
    catalog = built(
        tmp_path,
        EVENTS
        + derived("acme/a", "name: x, source: acme/events", "name: y, source: acme/b")
        + derived("acme/b", f"name: x, source: acme/a, readDelay: {delay}")
        + derived("acme/c", "name: x, source: acme/b"),
    )
    here = world(catalog, tmp_path, {name: [copy, copy] for name in ("acme/a", "acme/b", "acme/c")})
    here.ingest("acme/events", events("a"))

    def until_it_rests() -> None:
        here.settle()
        while here.advance_to_next_due("acme/c"):
            here.settle()

    with pytest.raises(Endless, match=r"derivations of acme/(\w) -> acme/\w -> acme/\1 do not"):
        until_it_rests()


def test_a_cycle_that_doubles_ends_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.catalog.testing.memory.DOCUMENTS_MAX", 500)
    catalog = built(tmp_path, EVENTS + derived("acme/ledger", *LEDGER))

    def twice(document: Any, _: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
        yield {"id": f"{document['id']}0"}
        yield {"id": f"{document['id']}1"}

    here = world(catalog, tmp_path, {"acme/ledger": [copy, twice]})
    here.ingest("acme/events", events("a"))
    with pytest.raises(Endless, match="acme/ledger -> acme/ledger") as raised:
        here.settle()
    assert raised.value.why == "the test has made 501 documents"


def test_combined_documents_are_as_far_as_the_furthest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.catalog.testing.memory.HOPS_MAX", 20)
    monkeypatch.setattr("penstock.catalog.testing.memory.DOCUMENTS_MAX", 100)
    catalog = built(tmp_path, EVENTS + derived("acme/ledger", *LEDGER))

    def twice(document: Any, _: dict[str, Any]) -> Iterable[Document]:  # noqa: ANN401
        yield {"id": document["id"]}
        yield {"id": document["id"]}

    here = world(catalog, tmp_path, {"acme/ledger": [copy, twice]})
    here.ingest("acme/events", events("a"))
    with pytest.raises(Endless) as raised:
        here.settle()
    assert raised.value.why == "a document came through 21 derivations, one after the other"


def test_a_language_on_frames_is_asked_for_only_when_there_is_something_to_read(
    tmp_path: Path,
) -> None:
    catalog = built(tmp_path, EVENTS + derived("acme/copies", "name: copy, source: acme/events"))
    here = MemoryWorld(catalog, directory=tmp_path, start=START, engines=lambda *_: None)
    here.settle()
    here.ingest("acme/events", events("a"))
    with pytest.raises(UserError, match="acme/copies needs Spark"):
        here.settle()


# --- graph ---

GRAPH = Graph(
    {
        "d": frozenset({"c", "b"}),
        "c": frozenset({"source"}),
        "b": frozenset({"c", "b"}),
        "x": frozenset({"y", "source"}),
        "y": frozenset({"x", "d"}),
    }
)


def test_derivations_come_after_those_they_read() -> None:
    assert GRAPH.in_order() == ["c", "b", "d", "x", "y"]


@pytest.mark.parametrize(
    ("collection", "writers"),
    [
        ("source", ""),
        ("c", "c"),
        ("d", "bcd"),
        ("x", "bcdxy"),
    ],
)
def test_writers_are_found_transitively(collection: str, writers: str) -> None:
    assert sorted(GRAPH.writers_of(collection)) == list(writers)


@pytest.mark.parametrize("deleted", ["true", "false"])
def test_a_derivation_that_is_deleted_is_not_part_of_it(tmp_path: Path, deleted: str) -> None:
    text = EVENTS + derived("acme/copies", "name: copy, source: acme/events")
    found = Graph.of(built(tmp_path, f"{text}    delete: {deleted}\n")).sources
    assert found == ({} if deleted == "true" else {"acme/copies": {"acme/events"}})


@pytest.mark.parametrize(
    ("name", "cycle"),
    [("b", "bb"), ("x", "xyx"), ("y", "yxy"), ("d", ""), ("c", ""), ("source", "")],
)
def test_cycles_are_found(name: str, cycle: str) -> None:
    assert GRAPH.cycle_through(name) == list(cycle)
