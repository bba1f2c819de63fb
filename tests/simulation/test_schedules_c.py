"""A quarter of the 10,000 schedules: files are what test processes share the work by."""

from __future__ import annotations

import pytest

from support.schedules import check


@pytest.mark.parametrize("first", [5000, 6250])
def test_no_schedule_loses_repeats_or_tears_anything(first: int) -> None:
    done = check(range(first, first + 1250))
    assert done.documents > 10_000
    assert done.transactions > 2_000
    assert done.recoveries > 150
