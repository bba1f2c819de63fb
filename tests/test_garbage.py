"""The collector is back afterwards, whatever happened, and stays off for who had it off."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from penstock.garbage import gc_paused


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    yield
    gc.enable()


def test_nothing_is_collected_within() -> None:
    with gc_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_blocks_may_lie_within_each_other() -> None:
    with gc_paused():
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_ends_it_too() -> None:
    @gc_paused()
    def fail() -> None:
        raise ValueError("no")

    for _ in range(2):  # a decorated function can be called again
        with pytest.raises(ValueError, match="no"):
            fail()
        assert gc.isenabled()


def test_who_has_turned_it_off_finds_it_off() -> None:
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()
