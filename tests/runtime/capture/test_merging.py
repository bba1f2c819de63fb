"""Documents that come with sequences are joined, in order and up to a size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.capture import jobs
from penstock.runtime.connector.capture import Broken, Documents, Given

GIVEN = st.tuples(st.integers(0, 2), st.integers(0, 4), st.booleans())


def made(at: int, binding: int, count: int, broken: bool) -> Given:
    texts = [f"{at}.{n}".encode() for n in range(count)]
    documents = Documents(
        texts=texts,
        origin=lambda n: f"{at}.{n}",
        broken=(Broken(origin="", text="", reason=""),) if broken else (),
    )
    return Given(binding=binding, documents=documents, bytes=count * 10)


@given(st.lists(GIVEN, max_size=12))
def test_every_document_is_there_once_in_the_order_of_its_binding(
    parts: list[tuple[int, int, bool]],
) -> None:
    some = [made(at, *part) for at, part in enumerate(parts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "TAKEN_BYTES", 50)
        merged = list(jobs._merged(some))
    for binding in range(3):
        expected = [
            text for each in some if each.binding == binding for text in each.documents.texts or ()
        ]
        joined = [documents for at, documents in merged if at == binding]
        assert [text for each in joined for text in each.texts or ()] == expected
        for each in joined:
            assert [each.origin(n).encode() for n in range(each.count)] == list(each.texts or ())
            assert each.broken or each.count <= 5
    assert sum(len(documents.broken) for _, documents in merged) == sum(b for _, _, b in parts)
