"""Reading stops at the disk limit, goes on below half of it, and does not stop for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import Bug
from penstock.shuffle.checkpoint import DISK_DEADLOCK_TICKS
from penstock.shuffle.pressure import DeadlockWatch, DiskDeadlock, Pressure


def test_pressure_is_kept_between_half_of_the_limit_and_all_of_it() -> None:
    pressure = Pressure(100)
    seen = []
    for change in (60, 40, -40, -11, 50):
        if change > 0:
            pressure.add(change)
        else:
            pressure.release(-change)
        seen.append((pressure.bytes, pressure.engaged))
    assert seen == [(60, False), (100, True), (60, True), (49, False), (99, False)]


@pytest.mark.parametrize(
    ("limit", "kept", "engaged"),
    [(100, 50, True), (100, 49, False), (101, 51, True), (101, 50, False), (1, 0, False)],
)
def test_pressure_goes_below_half_and_not_at_half(limit: int, kept: int, engaged: bool) -> None:
    pressure = Pressure(limit)
    pressure.add(limit)
    pressure.release(limit - kept)
    assert pressure.engaged == engaged


def test_more_cannot_be_released_than_was_kept() -> None:
    pressure = Pressure(100)
    pressure.add(10)
    with pytest.raises(Bug, match="11 bytes were released, and only 10"):
        pressure.release(11)
    pressure.release(10)
    assert pressure.bytes == 0


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="never"):
        Pressure(0)


@pytest.mark.parametrize(
    ("kept", "anything", "hinted"),
    [(99, True, True), (100, False, True), (149, False, True), (150, False, False)],
)
def test_what_is_waited_for_may_exceed_the_limit_by_half(
    kept: int, anything: bool, hinted: bool
) -> None:
    pressure = Pressure(100)
    pressure.add(kept)
    assert pressure.allows(hinted=False) == anything
    assert pressure.allows(hinted=True) == hinted


@given(st.integers(1, 40), st.lists(st.integers(-30, 30), max_size=30))
def test_what_is_kept_is_bounded_by_the_limit_and_one_read(limit: int, changes: list[int]) -> None:
    pressure = Pressure(limit)
    for change in changes:
        if change < 0:
            pressure.release(min(-change, pressure.bytes))
        elif pressure.allows(hinted=change % 2 == 0):
            pressure.add(change)
        assert pressure.bytes < limit * 1.5 + 30
        assert pressure.engaged or pressure.bytes < limit
        assert not pressure.engaged or pressure.bytes >= limit / 2


STUCK = {"requested": True, "answerable": False, "blocked": True, "drained": True}


def stuck_for(watch: DeadlockWatch, ticks: int) -> None:
    for _ in range(ticks):
        watch.tick(**STUCK)


def test_a_deadlock_is_an_error_that_says_what_to_do() -> None:
    watch = DeadlockWatch()
    stuck_for(watch, DISK_DEADLOCK_TICKS - 1)
    with pytest.raises(DiskDeadlock, match="300 seconds") as caught:
        watch.tick(**STUCK)
    assert "raise the disk limit" in str(caught.value.fix)


@pytest.mark.parametrize(
    "but",
    [
        pytest.param({"requested": False}, id="nobody asks"),
        pytest.param({"answerable": True}, id="there is something to answer"),
        pytest.param({"blocked": False}, id="some lane may read"),
        pytest.param({"drained": False}, id="the task still processes what it was given"),
    ],
)
def test_any_way_out_restarts_the_count(but: dict[str, bool]) -> None:
    watch = DeadlockWatch()
    stuck_for(watch, DISK_DEADLOCK_TICKS - 1)
    watch.tick(**(STUCK | but))
    stuck_for(watch, DISK_DEADLOCK_TICKS - 1)
    with pytest.raises(DiskDeadlock):
        watch.tick(**STUCK)


def test_a_moment_without_pressure_restarts_the_count() -> None:
    watch = DeadlockWatch()
    stuck_for(watch, DISK_DEADLOCK_TICKS - 1)
    watch.unblock()
    stuck_for(watch, DISK_DEADLOCK_TICKS)
    with pytest.raises(DiskDeadlock):
        watch.tick(**STUCK)


def test_a_slow_task_is_no_deadlock() -> None:
    """It consumes late, and each time at the last moment."""
    watch = DeadlockWatch()
    for _ in range(20):
        stuck_for(watch, DISK_DEADLOCK_TICKS - 1)
        watch.tick(**(STUCK | {"drained": False}))
