"""Byte deltas add up to the position of a read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.byte_progress import ByteDeltas, ByteProgress, byte_position


def test_deltas_say_what_was_read_and_how_the_distance_grew() -> None:
    progress = ByteProgress.starting_at(1000).moved(read=3000, head=5000)
    deltas, progress = progress.report()
    assert deltas == ByteDeltas(read=2000, behind=2000)
    deltas, progress = progress.moved(read=5000, head=5000).report()
    assert deltas == ByteDeltas(read=2000, behind=-2000)
    assert progress.report()[0] == ByteDeltas(read=0, behind=0)


@given(
    st.integers(0, 99),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=9),
)
def test_late_reports_lose_nothing(start: int, steps: list[tuple[int, int, bool]]) -> None:
    progress = ByteProgress.starting_at(start)
    reports = []
    for read, ahead, is_reported in [*steps, (0, 0, True)]:
        position = progress.read + read
        progress = progress.moved(read=position, head=max(progress.head, position + ahead))
        if is_reported:
            deltas, progress = progress.report()
            reports.append(deltas)
    assert sum(deltas.read for deltas in reports) == progress.read - start
    assert sum(deltas.behind for deltas in reports) == progress.head - progress.read


@pytest.mark.parametrize(
    ("offset", "want"), [(10, 500), (11, 533), (12, 566), (13, 600)], ids="offset {}".format
)
def test_bytes_are_spread_over_rows(offset: int, want: int) -> None:
    where = byte_position(offset, first_offset=10, rows=3, first_byte=500, size_bytes=100)
    assert where == want


def test_rows_without_bytes_have_a_position() -> None:
    assert byte_position(7, first_offset=7, rows=1, first_byte=90, size_bytes=0) == 90
    assert byte_position(7, first_offset=7, rows=0, first_byte=90, size_bytes=0) == 90


@pytest.mark.parametrize("offset", [9, 14])
def test_an_offset_of_another_fragment_is_refused(offset: int) -> None:
    with pytest.raises(ValueError, match="not in the 3 rows"):
        byte_position(offset, first_offset=10, rows=3, first_byte=500, size_bytes=100)
