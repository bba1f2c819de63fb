"""Records as documents: pure."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.connectors.kafka.records import META_MEMBERS, Form
from penstock.model.schema import compiled
from penstock.native.take import Taker

ALL = tuple(META_MEMBERS)


@dataclass
class Made:
    """A record."""

    v: bytes | None = b'{"id": 1}'
    k: bytes | None = None
    p: int = 0
    o: int = 0
    t: tuple[int, int] = (1, 1_789_000_000_123)
    h: list[tuple[str, bytes | None]] | None = field(default=None)

    def value(self) -> bytes | None:
        return self.v

    def key(self) -> bytes | None:
        return self.k

    def partition(self) -> int:
        return self.p

    def offset(self) -> int:
        return self.o

    def timestamp(self) -> tuple[int, int]:
        return self.t

    def headers(self) -> Any:  # noqa: ANN401 - as the client has them
        return self.h


def form(format_: str = "json", members: tuple[str, ...] = (), **others: Any) -> Form:  # noqa: ANN401
    return Form(topic="orders", format=format_, members=members, **others)  # type: ignore[arg-type]


def texts(made: Form, *records: Made) -> list[Any]:
    found = made.documents(records).texts
    assert found is not None
    return [json.loads(text) for text in found]


def metas(made: Form, *records: Made) -> list[dict[str, Any]]:
    batch = made.documents(records).meta
    assert batch is not None
    rows = batch.to_pylist()
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def test_a_json_value_is_the_document_as_it_came() -> None:
    record = Made(b'{"id": 1.10}')
    assert form().documents([record]).texts == [b'{"id": 1.10}']


def test_text_and_bytes_become_a_member() -> None:
    assert texts(form("text"), Made('a "quoted" ü'.encode())) == [{"value": 'a "quoted" ü'}]
    assert texts(form("raw"), Made(b"\xff\x00")) == [{"value": "/wA="}]


def test_text_that_is_none_is_refused_and_not_changed() -> None:
    schema = {
        "type": "object",
        "required": ["value"],
        "properties": {"value": {"type": "string"}},
    }
    taker = Taker(compiled(json.dumps(schema)))
    documents = form("text").documents([Made(b"fine"), Made(b"\xff")])
    taken = taker.take_texts(documents.texts or ())
    assert taken.rows.num_rows == 1
    assert [refused.at for refused in taken.refused] == [1]


def test_meta_has_everything_about_a_record() -> None:
    record = Made(k=b"k1", p=3, o=17, h=[("trace", b"abc"), ("bin", b"\xff"), ("none", None)])
    assert metas(form(members=ALL), record) == [
        {
            "op": "u",
            "topic": "orders",
            "partition": 3,
            "offset": 17,
            "timestamp": "2026-09-10T00:26:40.123Z",
            "key": "k1",
            "headers": [
                {"name": "trace", "value": "abc", "valueBase64": None},
                {"name": "bin", "value": None, "valueBase64": "/w=="},
                {"name": "none", "value": None, "valueBase64": None},
            ],
        }
    ]


def test_a_key_that_is_no_text_is_not_changed() -> None:
    made = form(members=("key", "keyBase64"))
    assert metas(made, Made(k=b"\xff\x00"), Made(k=None)) == [{"keyBase64": "/wA="}, {}]


@pytest.mark.parametrize(
    ("time", "want"),
    [
        ((0, -1), {}),
        ((1, -1), {}),
        ((1, 2**62), {}),
        ((2, 0), {"timestamp": "1970-01-01T00:00:00.000Z"}),
        ((1, 253_402_300_799_999), {"timestamp": "9999-12-31T23:59:59.999Z"}),
    ],
)
def test_a_record_may_have_no_time_that_a_calendar_has(
    time: tuple[int, int], want: dict[str, str]
) -> None:
    assert metas(form(members=("timestamp",)), Made(t=time)) == [want]


def test_a_tombstone_is_a_deletion_of_the_key_that_its_record_has() -> None:
    made = form(members=("op",))
    records = [Made(), Made(None, k=b'{"id": 7}', o=1), Made(None, k=b"7", o=2), Made(o=3)]
    assert texts(made, *records) == [{"id": 1}, {"id": 7}, {"id": 1}]
    assert [meta["op"] for meta in metas(made, *records)] == ["u", "d", "u"]
    assert made.documents(records).origin(2) == "topic orders, partition 0, offset 3"


@pytest.mark.parametrize("format_", ["json", "text", "raw"])
def test_a_tombstone_without_meta_says_nothing(format_: str) -> None:
    made = form(format_, keyed_by_meta=False)
    assert len(texts(made, Made(None, k=b'{"id": 7}'), Made(b"{}"))) == 1


@pytest.mark.parametrize("format_", ["json", "text", "raw"])
def test_a_tombstone_is_a_document_where_the_key_is_its_place(format_: str) -> None:
    made = form(format_, members=("op", "offset"), keyed_by_meta=True)
    assert texts(made, Made(None, k=None, o=5)) == [{}]
    assert metas(made, Made(None, k=None, o=5)) == [{"op": "d", "offset": 5}]


def test_no_records_are_no_documents() -> None:
    for members in ((), ALL):
        assert form(members=members).documents([]).count == 0
    only_tombstones = form().documents([Made(None)])
    assert only_tombstones.count == 0


def test_a_form_can_be_sent_to_a_task() -> None:
    made = form("raw", ALL)
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301
