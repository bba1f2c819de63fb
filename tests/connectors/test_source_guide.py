"""The source of docs/guides/add-a-source.md is one: its code is run as it is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import UserError
from penstock.model.spec import CollectionSpec, Frozen
from penstock.runtime.connector.capture import (
    Capture,
    CaptureSequence,
    Idle,
    Opening,
    SourceBinding,
)
from penstock.runtime.patches import apply_patches

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "add-a-source.md"


def printed() -> dict[str, Any]:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    exec(found[1], names)  # noqa: S102 - the page's own code
    return names


def test_the_source_of_the_guide_goes_on_where_it_was() -> None:
    source: Capture = printed()["Countdown"]({"start": 3}, where="capture acme/numbers")
    source.check()
    (found,) = source.discover()
    schema = Frozen(found.schema)
    collection = CollectionSpec(
        name="acme/numbers", key=found.key, write_schema=schema, read_schema=schema, fields=()
    )
    binding = SourceBinding(
        index=0, state_key="numbers.v0", resource=Frozen(found.resource), collection=collection
    )
    state: Any = {}
    given: list[bytes] = []
    for _ in range(4):  # a session for each sequence
        session = source.open(Opening(task="acme/numbers", bindings=(binding,), state=state))
        polled = session.poll(0.1)
        if isinstance(polled, CaptureSequence):
            given += [t for each in polled.given for t in each.documents.texts or ()]
            state = apply_patches(state, polled.patches)
        session.close()
    assert given == [b'{"n": 3}', b'{"n": 2}', b'{"n": 1}']
    assert polled is Idle.NOTHING


def test_a_wrong_configuration_is_refused() -> None:
    with pytest.raises(UserError, match="start"):
        printed()["Countdown"]({"star": 3}, where="capture acme/numbers")
