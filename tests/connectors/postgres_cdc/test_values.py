"""Values from PostgreSQL's texts to JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.postgres_cdc.rows import KeyLost, RowTexts, stamp, time_text
from penstock.connectors.postgres_cdc.snapshot import TablePart, copied_row, splits_of
from penstock.connectors.postgres_cdc.tables import Leaf, bases_of
from penstock.connectors.postgres_cdc.values import ANY_ARRAY, as_text, type_of
from penstock.connectors.postgres_cdc.wire import UNCHANGED, ColumnOf, Row

NUMERIC_10_0 = (10 << 16 | 0) + 4
NUMERIC_10_2 = (10 << 16 | 2) + 4
NUMERIC_19_0 = (19 << 16 | 0) + 4


@pytest.mark.parametrize(
    ("oid", "modifier", "given_", "want"),
    [
        (16, -1, "t", "true"),
        (16, -1, "f", "false"),
        (20, -1, "-9223372036854775808", "-9223372036854775808"),
        (701, -1, "1e+20", "1e+20"),
        (701, -1, "NaN", '"NaN"'),
        (701, -1, "-Infinity", '"-Infinity"'),
        (1700, -1, "12.50", '"12.50"'),
        (1700, NUMERIC_10_2, "12.50", '"12.50"'),
        (1700, NUMERIC_10_0, "12", "12"),
        (1700, NUMERIC_10_0, "NaN", '"NaN"'),
        (1700, NUMERIC_19_0, "12", '"12"'),
        (25, -1, 'a "b"\\\n', '"a \\"b\\"\\\\\\n"'),
        (
            2950,
            -1,
            "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
            '"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"',
        ),
        (1082, -1, "2026-11-17", '"2026-11-17"'),
        (1114, -1, "2026-11-17 08:30:00.5", '"2026-11-17T08:30:00.5"'),
        (1114, -1, "infinity", '"infinity"'),
        (1184, -1, "2026-11-17 08:30:00+00", '"2026-11-17T08:30:00Z"'),
        (1184, -1, "0044-03-15 12:00:00+00 BC", '"0044-03-15 12:00:00+00 BC"'),
        (1184, -1, "10000-01-01 00:00:00+00", '"10000-01-01 00:00:00+00"'),
        (114, -1, '{"a":\n 1}', '{"a":  1}'),
        (3802, -1, '{"a": [1, null]}', '{"a": [1, null]}'),
        (17, -1, "\\x00ff", '"AP8="'),
        (1007, -1, "{1,NULL,3}", "[1,null,3]"),
        (1007, -1, "{}", "[]"),
        (1007, -1, "[0:1]={1,2}", "[1,2]"),
        (1007, -1, "{{1,2},{3,4}}", "[[1,2],[3,4]]"),
        (1009, -1, '{a,"b,c","NULL",NULL,"d\\"e","{"}', '["a","b,c","NULL",null,"d\\"e","{"]'),
        (1231, -1, "{1.10,NaN}", '["1.10","NaN"]'),
        (869, -1, "10.0.0.1", '"10.0.0.1"'),
    ],
)
def test_values_become_json(oid: int, modifier: int, given_: str, want: str) -> None:
    text = type_of(oid, modifier, {}).convert(given_.encode())
    assert text.decode() == want
    json.loads(text)


@given(st.text())
def test_every_text_is_itself(value: str) -> None:
    assert json.loads(as_text(value.encode())) == value


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")) | st.none()))
def test_arrays_of_texts(values: list[str | None]) -> None:
    def quoted(value: str | None) -> str:
        if value is None:
            return "NULL"
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'

    text = "{" + ",".join(map(quoted, values)) + "}"
    assert json.loads(type_of(1009, -1, {}).convert(text.encode())) == values


def test_types_of_users_are_what_they_are_made_of() -> None:
    rows = {
        20000: ("d", 23, -1, 0),  # a domain over int4
        20001: ("d", 20000, -1, 0),  # a domain over that
        20002: ("b", 0, -1, 20001),  # an array of it
        20003: ("b", 0, -1, 30000),  # an array of an enum
        20004: ("d", 1700, NUMERIC_10_0, 0),  # a domain over numeric(10)
    }
    bases = bases_of(rows)
    assert bases[20001] == (23, -1)
    assert bases[20002] == (1007, -1)
    assert bases[20003] == (ANY_ARRAY, -1)
    assert type_of(20004, -1, bases).convert(b"7") == b"7"
    assert type_of(20003, -1, bases).convert(b"{a,b}") == b'["a","b"]'
    assert type_of(30000, -1, bases).convert(b"a") == b'"a"'


# ------------------------------------------------------------------------------------------- rows

COLUMNS = [ColumnOf("id", 23, -1, True), ColumnOf("big", 25, -1, False)]
STAMP = stamp("public", "items", 0x1000, xid=7, time_us=0)


def texts() -> RowTexts:
    return RowTexts(COLUMNS, ["id"], {})


def read(*made: bytes) -> list[dict[str, object]]:
    return [json.loads(text) for text in made]


def test_a_document_has_its_columns_and_says_where_it_comes_from() -> None:
    assert read(texts().created([b"1", None], STAMP)) == [
        {
            "id": 1,
            "big": None,
            "_meta": {
                "op": "c",
                "source": {
                    "lsn": "0/1000",
                    "txid": 7,
                    "ts": "2000-01-01T00:00:00.000000Z",
                    "schema": "public",
                    "table": "items",
                },
            },
        }
    ]


def test_a_large_value_that_did_not_change_is_left_out() -> None:
    (document,) = read(*texts().updated(None, [b"1", UNCHANGED], STAMP, whole=False))
    assert document.keys() == {"id", "_meta"}


def test_a_whole_old_row_is_shown_and_fills_in_what_did_not_change() -> None:
    old: Row = [b"1", b"old"]
    (document,) = read(*texts().updated(old, [b"1", UNCHANGED], STAMP, whole=True))
    assert document["big"] == "old"
    assert document["_meta"]["before"] == {"id": 1, "big": "old"}  # type: ignore[index]


def test_another_key_is_a_delete_and_a_create() -> None:
    gone, made = read(*texts().updated([b"1", None], [b"2", b"x"], STAMP, whole=False))
    assert (gone["id"], gone["_meta"]["op"], "big" in gone) == (1, "d", False)  # type: ignore[index]
    assert (made["id"], made["_meta"]["op"], made["big"]) == (2, "c", "x")  # type: ignore[index]


def test_a_value_that_is_nowhere_in_the_log_is_not_lost_silently() -> None:
    with pytest.raises(KeyLost, match="big"):
        texts().updated([b"1", None], [b"2", UNCHANGED], STAMP, whole=False)


@given(st.integers(-(10**17), 10**17))
def test_times_are_those_of_the_epoch_of_postgres(time_us: int) -> None:
    if time_us >= -62_000_000_000_000_000:
        shown = time_text(time_us)
        assert shown.endswith("Z")
        assert (time_us == 0) == (shown == "2000-01-01T00:00:00.000000Z")


# -------------------------------------------------------------------------------------- snapshots


@given(
    st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")) | st.none(), min_size=1)
)
def test_lines_of_a_copy(values: list[str | None]) -> None:
    def escaped(value: str | None) -> str:
        if value is None:
            return "\\N"
        for char, code in (("\\", "\\"), ("\b", "b"), ("\f", "f"), ("\n", "n"), ("\r", "r")):
            value = value.replace(char, "\\" + code)
        return value.replace("\t", "\\t").replace("\v", "\\v")

    line = "\t".join(map(escaped, values)).encode()
    assert copied_row(line) == [None if each is None else each.encode() for each in values]


@given(
    st.lists(st.tuples(st.integers(0, 2**36), st.integers(0, 10_000)), min_size=1, max_size=4),
    st.booleans(),
)
def test_splits_cover_every_block_once(sizes: list[tuple[int, int]], by_blocks: bool) -> None:
    leaves = [Leaf(quoted=f"t{at}", bytes=b, blocks=n) for at, (b, n) in enumerate(sizes)]
    splits = splits_of(leaves, by_blocks=by_blocks)
    for leaf in leaves:
        own = [split for split in splits if split.source == leaf.quoted]
        assert own[0].start == 0
        assert own[-1].end is None
        assert [each.end for each in own[:-1]] == [each.start for each in own[1:]]


def test_a_table_in_one_split_is_read_without_a_condition() -> None:
    assert TablePart("t").where == ""
    assert TablePart("t", 0, 5).where == " WHERE ctid >= '(0,0)'::tid AND ctid < '(5,0)'::tid"
