"""What goes through the pipe, and the state as it is kept."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.python_source.frames import (
    Frame,
    FrameKind,
    FrameReader,
    NoFrame,
    encode,
)
from penstock.connectors.python_source.progress import Progress
from penstock.runtime.patches import apply_patches

frames = st.builds(Frame, st.sampled_from(FrameKind), st.text(max_size=8), st.binary(max_size=40))
states = st.dictionaries(
    st.sampled_from(["orders", "items", "after"]),
    st.none() | st.integers() | st.dictionaries(st.text(max_size=2), st.none() | st.integers()),
    max_size=3,
)


@given(st.lists(frames, max_size=6), st.lists(st.integers(1, 30), min_size=1))
def test_frames_come_as_they_were_written_however_they_are_cut(
    written: list[Frame], sizes: list[int]
) -> None:
    data = b"".join(map(encode, written))
    reader, found, at = FrameReader(), list[Frame](), 0
    while at < len(data):
        size = sizes[len(found) % len(sizes)]
        found += reader.feed(data[at : at + size])
        at += size
    assert found == written
    assert reader.rest == 0


def test_what_is_no_frame_is_refused() -> None:
    with pytest.raises(NoFrame):
        list(FrameReader().feed(b"hello, this is no frame"))


KEYS = {"orders": "orders.v0", "items": "items.v0"}


@given(st.lists(st.tuples(states, st.booleans()), min_size=1, max_size=5))
def test_a_state_is_kept_exactly(given_states: list[tuple[dict[str, Any], bool]]) -> None:
    progress, kept, wanted = Progress.of({}, KEYS), {}, {}
    for value, merge in given_states:
        patches = progress.advance(value, merge=merge)
        kept = apply_patches(kept, patches)
        wanted = apply_patches(wanted, [value]) if merge else value
        assert Progress.of(kept, KEYS).value == progress.value == wanted
        assert Progress.of(kept, KEYS).begun


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        pytest.param({"orders": 1, "items": 2}, {"items": 2}, id="its own member goes"),
        pytest.param({"after": 7}, {}, id="it has none: everything goes"),
    ],
)
def test_a_raised_backfill_begins_anew(value: dict[str, Any], wanted: dict[str, Any]) -> None:
    kept = apply_patches({}, Progress.of({}, KEYS).advance(value, merge=False))
    raised = {**KEYS, "orders": "orders.v1"}
    progress = Progress.of(kept, raised)
    assert progress.value == wanted
    kept = apply_patches(kept, progress.stay())
    assert Progress.of(kept, raised) == Progress(wanted, raised, begun=True), "once, and not again"
    assert progress.stay() == ()


def test_a_stream_that_is_new_leaves_the_state_alone() -> None:
    kept = apply_patches({}, Progress.of({}, {"orders": "a"}).advance({"x": 1}, merge=False))
    assert Progress.of(kept, {"orders": "a", "items": "b"}).value == {"x": 1}
