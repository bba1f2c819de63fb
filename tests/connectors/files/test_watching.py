"""One watcher for the directories of all captures of a process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.connectors.files.watching import Watch

SOON_S = 20.0


@contextlib.contextmanager
def watching(*directories: Path) -> Iterator[list[Watch]]:
    """Watches of these directories, which the watcher serves already."""
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
    watches = [Watch(directory) for directory in directories]
    try:
        for watch in watches:
            assert watch.wait(SOON_S), "it is woken once when it is served"
        quiet(*watches)
        yield watches
    finally:
        for watch in watches:
            watch.close()


def quiet(*watches: Watch) -> None:
    """Wait until none of them is woken any more."""
    for watch in watches:
        while watch.wait(0.3):
            pass


def test_only_the_watch_of_the_directory_is_woken(tmp_path: Path) -> None:
    with watching(tmp_path / "a", tmp_path / "b") as (a, b):
        (tmp_path / "a" / "deep").mkdir()
        assert a.wait(SOON_S)
        quiet(a)
        (tmp_path / "a" / "deep" / "new.jsonl").write_text("{}")
        assert a.wait(SOON_S)
        assert not b.wait(0.3)


def test_watches_come_and_go_and_nothing_is_missed(tmp_path: Path) -> None:
    """Whatever happens while the watcher is replaced, a watch is woken after it."""
    with watching(tmp_path / "a") as (a,):
        other = Watch(tmp_path)
        (tmp_path / "a" / "1.jsonl").write_text("{}")
        assert a.wait(SOON_S)
        quiet(a, other)
        other.close()
        (tmp_path / "a" / "2.jsonl").write_text("{}")
        assert a.wait(SOON_S)


def test_a_directory_that_is_not_there_leaves_the_others_watched(tmp_path: Path) -> None:
    missing = Watch(tmp_path / "missing")
    try:
        with watching(tmp_path / "a") as (a,):
            (tmp_path / "a" / "1.jsonl").write_text("{}")
            assert a.wait(SOON_S)
            assert not missing.wait(0)
    finally:
        missing.close()


def test_many_watches_have_one_thread_which_ends_with_the_last(tmp_path: Path) -> None:
    def threads() -> int:
        return sum(thread.name == "penstock-files" for thread in threading.enumerate())

    with watching(*(tmp_path / str(n) for n in range(30))):
        assert threads() == 1
    until = time.monotonic() + SOON_S
    while threads():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("first", [True, False], ids=["before", "while"])
def test_a_watch_that_waits_can_be_woken(tmp_path: Path, first: bool) -> None:
    with watching(tmp_path / "a") as (a,):
        if first:
            a.wake()
        else:
            threading.Timer(0.1, a.wake).start()
        assert a.wait(SOON_S)
