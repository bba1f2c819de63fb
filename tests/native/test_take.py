"""Documents taken in: the sure road and the careful road lead to the same rows."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.schema import CompiledSchema
from penstock.native.arrow import to_json
from penstock.native.take import Taken, Taker

ORDERS = {
    "type": "object",
    "required": ["id", "at"],
    "properties": {
        "id": {"type": "integer", "minimum": 0},
        "at": {"type": "string", "format": "date-time"},
        "total": {"type": "number", "exclusiveMinimum": -5, "maximum": 1e6},
        "paid": {"type": "boolean"},
        "state": {"type": "string", "enum": ["new", "sent"]},
        "code": {"type": "string", "minLength": 2, "maxLength": 4},
        "tags": {"type": "array", "items": {"type": "string"}},
        "to": {
            "type": "object",
            "required": ["city"],
            "additionalProperties": False,
            "properties": {"city": {"type": "string"}, "zip": {"type": "string"}},
        },
        "_meta": {
            "type": "object",
            "required": ["file", "row"],
            "properties": {"file": {"type": "string"}, "row": {"type": "integer"}},
        },
    },
}
SCHEMA = CompiledSchema(ORDERS)


class Careful(Taker):
    """Takes the careful road only."""

    def __init__(self, schema: CompiledSchema) -> None:
        super().__init__(schema)
        self._sure = None


def meta(count: int) -> pa.RecordBatch:
    rows = [[f"f{at}" for at in range(count)], list(range(count))]
    return pa.RecordBatch.from_arrays([pa.array(r) for r in rows], names=["file", "row"])


def shown(taker: Taker, taken: Taken) -> tuple[list[str], list[tuple[int, tuple[str, ...]]]]:
    refused = [(each.at, tuple(map(str, each.violations))) for each in taken.refused]
    return to_json(taken.rows, taker.root), refused


VALUES = {
    "id": st.one_of(st.integers(-1, 5), st.sampled_from([2**63, 1.0, 1.5, "1", None, True])),
    "at": st.sampled_from(
        [
            "2026-01-31T10:00:00Z",
            "2024-02-29T00:00:00+01:00",
            "2026-02-30T00:00:00Z",
            "2026-04-31T00:00:00Z",
            "2026-01-01T24:00:00Z",
            "2026-01-01 10:00:00Z",
            "2026-01-01T10:00:00.123456789-23:59",
            "2026-01-01t10:00:00z",
            "2026-12-31T23:59:60Z",
            "now",
            1,
        ]
    ),
    "total": st.one_of(
        st.floats(allow_nan=False, allow_infinity=False),
        st.integers(-10, 10),
        st.sampled_from([-0.0, -5, 1e6, 2**53 + 1, 10**30, "1"]),
    ),
    "paid": st.sampled_from([True, False, "true", None, 1]),
    "state": st.sampled_from(["new", "sent", "New", "", None]),
    "code": st.one_of(st.text(max_size=5), st.sampled_from(["ab", "äöü", "\U0001f600\U0001f600"])),
    "tags": st.lists(st.one_of(st.text(max_size=3), st.none(), st.integers()), max_size=3),
    "to": st.one_of(
        st.none(),
        st.fixed_dictionaries({"city": st.text(max_size=3)}, optional={"zip": st.text(max_size=2)}),
        st.just({}),
        st.just({"city": "x", "more": 1}),
    ),
    "more": st.one_of(st.integers(), st.none()),
}
DOCUMENTS = st.fixed_dictionaries(
    {"id": st.integers(0, 9), "at": st.just("2026-01-31T10:00:00Z")},
    optional={name: values for name, values in VALUES.items() if name not in ("id", "at")},
)
WILD = st.fixed_dictionaries({}, optional=VALUES)
BROKEN = st.sampled_from(
    [b"", b"{", b"[]", b'{"id":1}{"id":2}', b'{"id":1,"id":2}', b"\xff", b'{"id":NaN}', b"null"]
)


@given(st.lists(DOCUMENTS, max_size=6))
def test_the_sure_road_takes_what_the_careful_road_takes(documents: list[Any]) -> None:
    texts = [msgspec.json.encode(document) for document in documents]
    sure, careful = Taker(SCHEMA), Careful(SCHEMA)
    some = meta(len(texts))
    assert shown(sure, sure.take_texts(texts, some)) == shown(
        careful, careful.take_texts(texts, some)
    )


@given(st.lists(st.one_of(WILD.map(msgspec.json.encode), BROKEN), max_size=6))
def test_nothing_bad_takes_the_sure_road(texts: list[bytes]) -> None:
    sure, careful = Taker(SCHEMA), Careful(SCHEMA)
    some = meta(len(texts))
    assert shown(sure, sure.take_texts(texts, some)) == shown(
        careful, careful.take_texts(texts, some)
    )


CHANGES = CompiledSchema(
    {
        "type": "object",
        "required": ["id", "always", "_meta"],
        "properties": {
            "id": {"type": "integer"},
            "always": {"type": ["string", "null"]},
            "total": {"type": ["string", "null"], "format": "number"},
            "size": {"type": ["number", "null"]},
            "note": {"type": "string"},
            "_meta": {
                "type": "object",
                "required": ["op"],
                "properties": {
                    "op": {"type": "string"},
                    "lsn": {"type": ["string", "null"]},
                    "source": {"type": "object", "properties": {"table": {"type": "string"}}},
                },
            },
        },
        "if": {"properties": {"_meta": {"properties": {"op": {"const": "d"}}}}},
        "then": {"reduce": {"strategy": "merge", "delete": True}},
        "else": {"reduce": {"strategy": "merge"}},
    }
)
TEXTS = st.sampled_from(["x", "null", '"total":', "1.50", "a\\u00e9", "\u00e9"])
META_OF = st.fixed_dictionaries(
    {"op": st.sampled_from("cud")},
    optional={
        "lsn": st.one_of(st.none(), TEXTS),
        "source": st.one_of(st.none(), st.fixed_dictionaries({}, optional={"table": TEXTS})),
        "more": st.none(),
    },
)
CHANGE = st.fixed_dictionaries(
    {"id": st.integers(0, 9), "always": st.one_of(st.none(), TEXTS), "_meta": META_OF},
    optional={
        "total": st.one_of(st.none(), st.sampled_from(["1.50", "-0", "1e3", "x", "NaN", "01"])),
        "size": st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
        "note": st.one_of(st.none(), TEXTS),
        "more": st.none(),
    },
)
SHAPES = st.lists(st.sampled_from(["total", "size", "note"]), max_size=3, unique=True)


@given(st.lists(CHANGE, max_size=5), SHAPES, st.booleans(), st.booleans())
def test_nulls_are_told_from_what_is_absent(
    documents: list[Any], without: list[str], spaced: bool, escaped: bool
) -> None:
    """Often a member is there in every document, or in none."""
    for document in documents:
        for name in without:
            document.pop(name, None)
    texts = [
        json.dumps(d, separators=(", ", " : ") if spaced else (",", ":")).encode()
        for d in documents
    ]
    if escaped and texts:
        texts[-1] = texts[-1].replace(b'"size"', b'"s\\u0069ze"')
    sure, careful = Taker(CHANGES), Careful(CHANGES)
    assert shown(sure, sure.take_texts(texts)) == shown(careful, careful.take_texts(texts))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b'{"id":1,"always":"x","note":null,"_meta":{"op":"c"}}', id="may not be null"),
        pytest.param(b'{"id":1,"always":"x","size":NaN,"_meta":{"op":"c"}}', id="no number"),
        pytest.param(b'{"id":1,"always":"x","size":-Infinity,"_meta":{"op":"c"}}', id="infinite"),
        pytest.param(b'{"id":1,"always":"\xff","_meta":{"op":"c"}}', id="no UTF-8"),
        pytest.param(b'{"id":1,"total":null,"_meta":{"op":"c"}}', id="must be there"),
        pytest.param(b'{"id":1,"always":null,"_meta":{"lsn":null}}', id="must be there, below"),
    ],
)
def test_what_is_refused_does_not_take_the_sure_road(text: bytes) -> None:
    for taker in (Taker(CHANGES), Careful(CHANGES)):
        taken = taker.take_texts([text])
        assert taken.rows.num_rows == 0
        assert len(taken.refused) == 1


@pytest.mark.parametrize("name", [b'"size" ', b'"size"\t', b'"s\\u0069ze"', b'"size"'])
def test_names_that_cannot_be_counted_are_not_taken_for_absent(name: bytes) -> None:
    texts = [
        b'{"id":1,"always":"x","size":null,"_meta":{"op":"c"}}',
        b'{"id":2,"always":"x",%s:2.5,"_meta":{"op":"c"}}' % name,
    ]
    taker = Taker(CHANGES)
    rows = [json.loads(row) for row in to_json(taker.take_texts(texts).rows, taker.root)]
    assert [row["size"] for row in rows] == [None, 2.5]


def test_changes_with_nulls_do_take_the_sure_road(monkeypatch: pytest.MonkeyPatch) -> None:
    taker = Taker(CHANGES)
    monkeypatch.setattr(taker, "_careful", None)
    texts = [
        b'{"id":1,"always":null,"total":null,"size":2.5,"_meta":{"op":"c","lsn":null}}',
        b'{"id":2,"always":"x","total":"1.50","size":null,"_meta":{"op":"d","lsn":"0/1"}}',
    ]
    taken = taker.take_texts(texts)
    assert [json.loads(row) for row in to_json(taken.rows, taker.root)] == [
        json.loads(text) for text in texts
    ]


def test_only_named_members_of_meta_are_kept_on_either_road() -> None:
    some = meta(2).append_column("more", pa.array(["a", "b"]))
    good = b'{"id": 1, "at": "2026-01-31T10:00:00Z"}'
    for taker in (Taker(SCHEMA), Careful(SCHEMA)):
        rows = to_json(taker.take_texts([good, good], some).rows, taker.root)
        assert [json.loads(row)["_meta"] for row in rows] == [
            {"file": "f0", "row": 0},
            {"file": "f1", "row": 1},
        ]


def test_plain_documents_do_take_the_sure_road(monkeypatch: pytest.MonkeyPatch) -> None:
    taker = Taker(SCHEMA)
    monkeypatch.setattr(taker, "_careful", None)
    text = (
        b'{"id": 1, "at": "2026-01-31T10:00:00Z", "total": 2, "paid": true, "state": "new",'
        b' "code": "abc", "tags": ["a"], "to": {"city": "Ulm"}}'
    )
    taken = taker.take_texts([text], meta(1))
    (row,) = map(json.loads, to_json(taken.rows, taker.root))
    assert row == {**json.loads(text), "_meta": {"file": "f0", "row": 0}}


def test_a_batch_with_one_bad_document_loses_only_that_one() -> None:
    taker = Taker(SCHEMA)
    good = b'{"id": %d, "at": "2026-01-31T10:00:00Z"}'
    texts = [good % at for at in range(10)]
    texts[4] = b'{"id": -4, "at": "2026-01-31T10:00:00Z"}'
    taken = taker.take_texts(texts, meta(10))
    assert [json.loads(row)["id"] for row in to_json(taken.rows, taker.root)] == [
        0, 1, 2, 3, 5, 6, 7, 8, 9,
    ]  # fmt: skip
    (refused,) = taken.refused
    assert (refused.at, refused.text) == (4, texts[4].decode())
    assert "/id" in str(refused.violations[0])


def test_columns_are_taken_as_they_are_or_judged_one_by_one() -> None:
    taker = Taker(SCHEMA)
    columns = pa.RecordBatch.from_arrays(
        [
            pa.array([1, 2, None], pa.int32()),
            pa.array(["2026-01-31T10:00:00Z"] * 3),
            pa.array([1.5, None, 2.5], pa.float32()),
        ],
        names=["id", "at", "total"],
    )
    taken = taker.take_columns(columns, meta(3))
    assert [json.loads(row).get("total") for row in to_json(taken.rows, taker.root)] == [1.5, None]
    (refused,) = taken.refused
    assert refused.at == 2
    assert "/id" in str(refused.violations[0])


def test_redacted_members_are_hidden_and_not_shown_in_refusals() -> None:
    schema = CompiledSchema(
        {
            "type": "object",
            "required": ["id"],
            "properties": {
                "id": {"type": "integer"},
                "mail": {"type": "string", "redact": {"strategy": "sha256"}},
                "card": {"type": "string", "maxLength": 4, "redact": {"strategy": "block"}},
            },
        }
    )
    taker = Taker(schema, salt=b"salt")
    taken = taker.take_texts([b'{"id":1,"mail":"a@b","card":"1234"}', b'{"id":2,"card":"12345"}'])
    (row,) = map(json.loads, to_json(taken.rows, taker.root))
    assert row["mail"].startswith("sha256:")
    assert "card" not in row
    assert "12345" not in str(taken.refused[0].violations)
