"""JSON pointers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model import pointer
from penstock.model.json_order import ABSENT

DOCUMENT = {"a": {"b": [10, {"c": None}]}, "": 1, "x/y": 2, "m~n": 3, "0": 4}


@given(st.lists(st.text(max_size=3)))
def test_parsing_undoes_rendering(tokens: list[str]) -> None:
    assert pointer.parse(pointer.render(tokens)) == tuple(tokens)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param("", DOCUMENT, id="the document"),
        pytest.param("/a/b/0", 10, id="an item"),
        pytest.param("/a/b/1/c", None, id="null is a value"),
        pytest.param("/", 1, id="the empty name"),
        pytest.param("/x~1y", 2, id="a slash"),
        pytest.param("/m~0n", 3, id="a tilde"),
        pytest.param("/0", 4, id="digits are a name in an object"),
        pytest.param("/a/b/2", ABSENT, id="beyond the end"),
        pytest.param("/a/b/01", ABSENT, id="a leading zero is no index"),
        pytest.param("/a/b/-", ABSENT, id="the item after the last"),
        pytest.param("/a/b/0/c", ABSENT, id="below a scalar"),
    ],
)
def test_get(text: str, want: object) -> None:
    assert pointer.get(DOCUMENT, text) == want  # type: ignore[arg-type]


def test_a_pointer_begins_with_a_slash() -> None:
    with pytest.raises(ValueError, match='begins with "/"'):
        pointer.parse("a/b")
