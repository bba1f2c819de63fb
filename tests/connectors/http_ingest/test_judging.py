"""What the endpoint lets in is what the runtime stores: a difference would stop the capture."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.connectors.http_ingest.judging import Judge, meta_batch
from penstock.model.schema import compiled
from penstock.native.take import Taker

SCHEMA = json.dumps(
    {
        "type": "object",
        "required": ["id"],
        "properties": {
            "id": {"type": "integer"},
            "n": {"type": "number", "multipleOf": 0.5},
            "d": {"type": "string", "format": "date"},
            "l": {"type": "array", "items": {"type": ["integer", "null"]}},
            "o": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
    }
)
META = json.dumps(
    {
        **json.loads(SCHEMA),
        "required": ["id", "_meta"],
        "properties": {
            **json.loads(SCHEMA)["properties"],
            "_meta": {
                "type": "object",
                "required": ["source"],
                "properties": {"source": {"type": "object", "required": ["path"]}},
            },
        },
    }
)
MEMBER: dict[str, Any] = {"source": {"receivedAt": "2026-11-17T00:00:00Z", "path": "orders"}}

numbers = st.integers() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=4) | st.dates().map(str),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=4,
)
documents = st.dictionaries(
    st.sampled_from(["id", "n", "d", "l", "o", "_meta", "other"]), values, max_size=5
).map(lambda some: json.dumps({"id": 1, **some}).encode())
texts = documents | values.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=12)


def agree(schema: str, some: list[bytes], meta: dict[str, Any] | None) -> None:
    judge, taker = Judge(schema), Taker(compiled(schema))
    batch = None if meta is None else meta_batch([meta] * len(some))
    taken = taker.take_texts(some, batch)
    said = judge.invalid(some, meta)
    assert {each["index"] for each in said} == {each.at for each in taken.refused}
    assert taken.rows.num_rows == len(some) - len(taken.refused)


@given(st.lists(texts, min_size=1, max_size=4))
@example([b'{"id": 1, "n": 1e400}'])
@example([b'{"id": 1.0}'])
@example([b'{"id": 9223372036854775808}'])
@example([b'{"id": "\\ud800"}'])
@example([b'{"id": 1, "id": "x"}'])
@example([b'{"id": 1, "other": "\xff"}'])
@example([b"\xef\xbb\xbf{}"])
def test_the_runtime_stores_what_is_let_in(some: list[bytes]) -> None:
    agree(SCHEMA, some, None)


@given(st.lists(texts, min_size=1, max_size=3))
def test_with_meta_too(some: list[bytes]) -> None:
    agree(META, some, MEMBER)
