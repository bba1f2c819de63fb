"""Texts that are no documents alone, and would be together."""

from __future__ import annotations

import json

import pytest

from penstock.model.schema import compiled
from penstock.native.take import Taker

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "a": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"b": {"type": "integer"}},
        }
    },
}


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param([b'{"a":', b"{}}{}"], id="cut in the middle of a document"),
        pytest.param([b"{}{}", b'{"a":{"b":1}'], id="two, and half of one"),
        pytest.param([b'{"a":{}', b"{}}"], id="cut after an inner one"),
    ],
)
def test_half_documents_do_not_complete_each_other(texts: list[bytes]) -> None:
    taken = Taker(compiled(json.dumps(SCHEMA))).take_texts(texts)
    assert [refused.at for refused in taken.refused] == [0, 1]
    assert taken.rows.num_rows == 0
