"""Lines of a pipe, and the messages in them."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.packages.airbyte_protocol import READER as AIRBYTE
from penstock.connectors.packages.line_splitter import LineSplitter, LineTooLong
from penstock.connectors.packages.messages import BrokenMessage
from penstock.connectors.packages.singer_protocol import READER as SINGER


@given(st.lists(st.binary(max_size=6)), st.lists(st.integers(0, 30)))
def test_lines_do_not_depend_on_how_bytes_arrive(parts: list[bytes], cuts: list[int]) -> None:
    data = b"\n".join(parts)
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    splitter = LineSplitter()
    lines = [
        line for a, b in itertools.pairwise(ends) for line in splitter.feed(data[a:b])
    ] + splitter.end()
    assert lines == [line for line in data.split(b"\n") if line.strip()]


def test_a_line_that_is_too_long_is_refused_before_its_end_comes() -> None:
    splitter = LineSplitter(limit=10)
    assert splitter.feed(b"0123456789\n01234") == [b"0123456789"]
    with pytest.raises(LineTooLong) as refused:
        splitter.feed(b"567890")
    assert refused.value.beginning == b"01234567890"


def test_a_document_keeps_its_text_to_the_byte() -> None:
    text = '{"n": 12345678901234567890.10, "a": [1 , 2], "id":"ü"}'
    found = AIRBYTE.read(
        f'{{"type":"RECORD","record":{{"stream":"s","data":{text},"emitted_at":1}}}}'.encode()
    )
    assert found is not None
    assert found.record is not None
    assert bytes(found.record.data).decode() == text
    tapped = SINGER.read(f'{{"type": "RECORD", "stream": "s", "record": {text}}}'.encode())
    assert tapped is not None
    assert bytes(tapped.record).decode() == text


@pytest.mark.parametrize(
    "line", [b"hello", b"[1]", b"{}", b'{"level": "info"}', b"{broken", b'{"type": 5}', b"\xff\xfe"]
)
def test_what_is_no_message_is_for_the_log(line: bytes) -> None:
    assert AIRBYTE.read(line) is None
    assert SINGER.read(line) is None


@pytest.mark.parametrize(
    "line",
    [
        b'{"type": "RECORD", "record": {"stream": "a", "da',
        b'{"type": "STATE", "sta',
        b'{"type": "RECORD", "record": {"stream": 5, "data": {}}}',
    ],
)
def test_a_broken_message_is_not_passed_over(line: bytes) -> None:
    with pytest.raises(BrokenMessage):
        AIRBYTE.read(line)


def test_a_document_that_is_no_json_is_left_to_those_who_judge_documents() -> None:
    found = AIRBYTE.read(json.dumps({
        "type": "RECORD", "record": {"stream": "s", "data": {"x": float("nan")}, "emitted_at": 1},
    }).encode())  # fmt: skip
    assert found is not None
    assert found.record is not None
    assert bytes(found.record.data) == b'{"x": NaN}'
    tapped = SINGER.read(b'{"type": "RECORD", "stream": "s", "record": {"x": NaN}}')
    assert tapped is not None
    assert bytes(tapped.record) == b'{"x": NaN}'
    with pytest.raises(BrokenMessage):
        SINGER.read(b'{"type": "STATE", "value": {"x": NaN}}')
