"""Recovery logs that go from one name of a task to the next, with crashes in between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import failpoints
from penstock.consensus.open import open_consensus
from penstock.consensus.statelog import Fenced
from penstock.consensus.store import Consensus
from penstock.errors import UserError
from penstock.runtime.recovery import Entries, Op
from penstock.runtime.renames import lead

POINTS = ["rename.after-moved", "rename.after-taken"]


class Crash(Exception):
    """The process died here."""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Consensus]:
    opened = await open_consensus(f"sqlite:///{tmp_path}/consensus.db")
    yield opened
    await opened.close()


def ours(entries: Entries) -> dict[bytes, bytes]:
    """What a leader wrote."""
    return {key: value for key, value in entries.items() if key.startswith((b"FC:", b"x"))}


async def write(store: Consensus, task: str, value: bytes, renamed_from: str | None = None) -> None:
    log = await lead(store, task, renamed_from=renamed_from)
    record: tuple[Op, ...] = (("put", b"FC:j\0t.v0\0123456", value),)
    await log.append(lambda _: record)


async def seen(store: Consensus, task: str, renamed_from: str | None = None) -> dict[bytes, bytes]:
    return ours((await lead(store, task, renamed_from=renamed_from)).state)


def crash_at(monkeypatch: pytest.MonkeyPatch, point: str | None) -> None:
    def hit(name: str) -> None:
        if name == point:
            raise Crash(name)

    monkeypatch.setattr(failpoints, "hit", hit)


@pytest.mark.parametrize("point", POINTS)
async def test_a_task_goes_on_under_its_new_name_whatever_crashes(
    store: Consensus, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    await write(store, "a", b"1")
    crash_at(monkeypatch, point)
    with pytest.raises(Crash):
        await lead(store, "b", renamed_from="a")
    crash_at(monkeypatch, None)
    with pytest.raises(UserError, match="a goes on as b"):
        await lead(store, "a")
    assert list((await seen(store, "b", "a")).values()) == [b"1"]
    await write(store, "b", b"2", "a")
    assert list((await seen(store, "b", "a")).values()) == [b"2"], "it is copied once"
    assert list((await seen(store, "b")).values()) == [b"2"], "renamedFrom may go again"


async def test_a_leader_of_the_old_name_is_fenced(store: Consensus) -> None:
    await write(store, "a", b"1")
    sleepy = await lead(store, "a")
    await lead(store, "b", renamed_from="a")
    with pytest.raises(Fenced):
        await sleepy.append(lambda _: (("put", b"x", b"late"),))
    assert list((await seen(store, "b", "a")).values()) == [b"1"]


async def test_names_that_do_not_fit_are_refused(store: Consensus) -> None:
    assert await seen(store, "new", "never-there") == {}
    await write(store, "a", b"1")
    await write(store, "own", b"9")
    with pytest.raises(UserError, match="own has stored documents of its own, and a has too"):
        await lead(store, "own", renamed_from="a")
    assert list((await seen(store, "a")).values()) == [b"1"], "nothing has moved"
    await lead(store, "b", renamed_from="a")
    with pytest.raises(UserError, match="a was renamed to b already"):
        await lead(store, "c", renamed_from="a")
    assert list((await seen(store, "c", "b")).values()) == [b"1"], "from name to name"
    for gone in ("a", "b"):
        with pytest.raises(UserError, match=f"{gone} goes on as"):
            await lead(store, gone)


async def test_an_attempt_that_stored_nothing_is_no_history(store: Consensus) -> None:
    """Renamed, run and refused by the endpoint; only then renamedFrom was added."""
    await write(store, "a", b"1")
    log = await lead(store, "b")
    await log.append(lambda _: (("put", b"last-applied", b"{}"),))
    assert list((await seen(store, "b", "a")).values()) == [b"1"]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, *POINTS])), max_size=8))
async def test_any_renames_and_crashes_keep_one_history(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[str, str | None]]
) -> None:
    """Back and forth between names: the last one has all that was written, and no other runs."""
    store = await open_consensus(f"sqlite:///{tmp_path_factory.mktemp('moves')}/consensus.db")
    monkeypatch = pytest.MonkeyPatch()
    try:
        name, count = "a", 0
        await write(store, name, b"0")
        for to, point in moves:
            if to == name:
                continue
            crash_at(monkeypatch, point)
            try:
                await lead(store, to, renamed_from=name)
            except Crash:
                crash_at(monkeypatch, None)
            count += 1
            assert list((await seen(store, to, name)).values()) == [b"%d" % (count - 1)]
            await write(store, to, b"%d" % count, name)
            with pytest.raises(UserError, match=f"{name} goes on as {to}"):
                await lead(store, name)
            name = to
        assert list((await seen(store, name)).values()) == [b"%d" % count]
    finally:
        monkeypatch.undo()
        await store.close()
