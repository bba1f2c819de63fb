"""What processes say of their tasks, for others: little, bounded, and harmless if it fails."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.consensus.open import open_consensus
from penstock.consensus.store import CasResult, Consensus, Determinate, ErrorKind, VersionedData
from penstock.errors import Unavailable
from penstock.runtime import reports
from penstock.runtime.introspection import Introspection, TaskReport
from penstock.runtime.reports import (
    SILENT_S,
    Key,
    Left,
    ProcessReport,
    Reported,
    ReportsMachine,
    Said,
    is_alive,
    load_reports,
    reporting,
)

MACHINE = ReportsMachine()


def process(name: str = "p1", beat: float = 5.0) -> ProcessReport:
    return ProcessReport(
        id=name, host="db1", pid=7, machine="elsewhere", started="1", since=1.0, beat=beat
    )


def task(name: str, doing: str = "running") -> TaskReport:
    return TaskReport(kind="capture", task=name, doing=doing, since=1.0)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- the machine


def folded(*diffs: Said | Left) -> Reported:
    state = MACHINE.initial()
    for diff in diffs:
        state = MACHINE.apply(state, MACHINE.decode_diff(MACHINE.encode_diff(diff), 1), 1)
    return MACHINE.decode_state(MACHINE.encode_state(state), 1, 1)


def test_a_process_that_leaves_takes_its_reports_along_but_for_failures() -> None:
    state = folded(
        Said(process=process("p1"), tasks=(task("a"), task("b"))),
        Said(process=process("p2"), tasks=(task("c"),)),
        Left(process="p1", failed=(task("b", "failed"),)),
    )
    assert state.of("capture", "a") == (None, None)
    assert state.of("capture", "b") == (None, task("b", "failed"))
    assert state.of("capture", "c") == (process("p2"), task("c"))
    assert state.of("derivation", "c") == (None, None), "another kind of the same name"


def test_whoever_runs_a_task_last_speaks_of_it() -> None:
    state = folded(
        Said(process=process("p1"), tasks=(task("a"),)),
        Said(process=process("p2"), tasks=(task("a", "starting"),)),
        Left(process="p1"),
    )
    assert state.of("capture", "a") == (process("p2"), task("a", "starting"))


def test_a_task_that_a_process_lets_go_is_forgotten_unless_another_runs_it() -> None:
    both: tuple[Key, ...] = (("capture", "a"), ("capture", "b"))
    state = folded(
        Said(process=process("p1"), tasks=(task("a"), task("b"))),
        Said(process=process("p2"), tasks=(task("b"),)),
        Said(process=process("p1"), gone=both),
    )
    assert state.of("capture", "a") == (None, None)
    assert state.of("capture", "b") == (process("p2"), task("b"))


def test_a_task_that_is_gone_is_forgotten() -> None:
    state = folded(
        Said(process=process(), tasks=(task("a"), task("b"))), Left(forget=(("capture", "a"),))
    )
    assert state.of("capture", "a")[1] is None
    assert state.of("capture", "b")[1] == task("b")


diffs = st.lists(
    st.builds(
        Said,
        process=st.builds(process, st.sampled_from(["p1", "p2", "p3"]), st.floats(0, 9)),
        tasks=st.lists(st.builds(task, st.sampled_from("abcd")), max_size=3).map(tuple),
    )
    | st.builds(
        Left,
        process=st.none() | st.sampled_from(["p1", "p2", "p3"]),
        failed=st.lists(
            st.builds(task, st.sampled_from("abcd"), st.just("failed")), max_size=2
        ).map(tuple),
    ),
    max_size=12,
)


@given(diffs)
def test_the_log_stays_small(said: list[Said | Left]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reports, "PROCESSES_MAX", 2)
        patch.setattr(reports, "TASKS_MAX", 3)
        state = folded(*said)
    assert len(state.processes) <= 2
    assert len(state.tasks) <= 3


# ----------------------------------------------------------------------------------------- liveness


def test_a_process_of_this_machine_is_known_to_live_or_not() -> None:
    mine = msgspec.structs.replace(
        process(),
        pid=os.getpid(),
        machine=reports._machine(),
        started=reports._started(os.getpid()),
    )
    now = mine.beat + 10 * SILENT_S
    assert is_alive(mine, now), "however long it was silent"
    assert not is_alive(msgspec.structs.replace(mine, started="1"), now), "a later one of its pid"
    assert not is_alive(msgspec.structs.replace(mine, pid=2**22 + 1), now)


def test_a_process_elsewhere_lives_as_long_as_it_is_heard_of() -> None:
    assert is_alive(process(beat=100.0), 100.0 + SILENT_S)
    assert not is_alive(process(beat=100.0), 101.0 + SILENT_S)


# ------------------------------------------------------------------------------------- the reporter


@dataclass
class Counting:
    """Counts what is written to a store; refuses it, or keeps the answer back, if told to."""

    store: Consensus
    writes: int = 0
    refuses: bool = False
    silent_at: int | None = None
    """The number of a write that lands, and is never answered."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self.store, name)

    @property
    def consensus(self) -> Consensus:
        return cast("Consensus", self)

    async def compare_and_set(self, key: str, new: VersionedData) -> CasResult:
        if self.refuses:
            raise Determinate(ErrorKind.PERMISSION_DENIED, "not yours")
        self.writes += 1
        number = self.writes
        result = await self.store.compare_and_set(key, new)
        if number == self.silent_at:
            await asyncio.Event().wait()
        return result


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Counting]:
    opened = await open_consensus(f"sqlite:///{tmp_path / 'c.db'}")
    yield Counting(opened)
    await opened.close()


async def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 30
    while not await holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "LOOK_S", 0.02)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("number", [1, 2])
async def test_a_process_that_leaves_in_the_middle_of_a_write_is_gone(
    store: Counting, number: int
) -> None:
    store.silent_at = number
    seen = Introspection(time.time)
    activity = seen.task("materialization", "acme/views")
    async with reporting(store.consensus, seen):
        activity.runs("0100")

        async def has_landed() -> bool:
            if store.writes == 1:
                activity.fails(Unavailable("away"), retry_in_s=9)
            return store.writes == number and bool((await load_reports(store.consensus)).tasks)

        await until(has_landed)
        await asyncio.sleep(0.05)
    assert await load_reports(store.consensus) == Reported()


@pytest.mark.usefixtures("quick")
async def test_others_see_what_matters_at_once_and_nothing_when_it_is_over(store: Counting) -> None:
    seen = Introspection(time.time)
    activity = seen.task("materialization", "acme/views")
    async with reporting(store.consensus, seen):
        activity.runs("0100")

        async def doing(what: str) -> bool:
            _, report = (await load_reports(store.consensus)).of("materialization", "acme/views")
            return report is not None and report.doing == what

        await until(lambda: doing("running"))
        process, _ = (await load_reports(store.consensus)).of("materialization", "acme/views")
        assert process is not None
        assert process.pid == os.getpid()
        assert is_alive(process, time.time())
        activity.fails(Unavailable("away"), retry_in_s=9)
        await until(lambda: doing("retrying"))
        seen.forget("materialization", "acme/views")

        async def gone() -> bool:
            return not (await load_reports(store.consensus)).tasks

        await until(gone)
    assert await load_reports(store.consensus) == Reported()


@pytest.mark.usefixtures("quick")
async def test_two_hundred_idle_tasks_write_next_to_nothing(
    store: Counting,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Introspection(time.time)
    activities = [seen.task("materialization", f"acme/{n}") for n in range(200)]
    for activity in activities:
        activity.runs()
    async with reporting(store.consensus, seen):
        await asyncio.sleep(0.5)
        assert store.writes == 1, "what there is, once"
        for activity in activities:
            activity.transaction_is(is_open=True)
        await asyncio.sleep(0.3)
        assert store.writes == 1, "mere progress waits"
        monkeypatch.setattr(reports, "PROGRESS_S", 0.1)
        await asyncio.sleep(0.3)
        assert store.writes == 2, "and is then written together"
        monkeypatch.setattr(reports, "BEAT_S", 0.1)
        await asyncio.sleep(0.5)
        assert 3 <= store.writes <= 7, "heartbeats"


async def test_a_run_that_is_over_soon_leaves_only_its_failures(store: Counting) -> None:
    seen = Introspection(time.time)
    async with reporting(store.consensus, seen):
        seen.task("materialization", "acme/a").runs()
        seen.task("materialization", "acme/a").ends()
    assert store.writes == 0
    async with reporting(store.consensus, seen):
        seen.task("materialization", "acme/b").fails(Unavailable("away"), retry_in_s=None)
    state = await load_reports(store.consensus)
    assert state.processes == {}
    _, report = state.of("materialization", "acme/b")
    assert report is not None
    assert report.failure is not None
    assert report.failure.what == "away"


@pytest.mark.usefixtures("quick")
async def test_a_store_that_refuses_it_is_left_alone(
    store: Counting,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "penstock.runtime")
    store.refuses = True
    seen = Introspection(time.time)
    seen.task("materialization", "acme/a").fails(Unavailable("away"), retry_in_s=None)
    async with reporting(store.consensus, seen):
        await asyncio.sleep(0.3)
    said = [r.getMessage() for r in caplog.records if "will not show" in r.getMessage()]
    assert len(said) == 1
    assert "not yours" in said[0]
