"""Who leads a task, and whether it lives, as other processes see it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from msgspec import structs

from penstock.consensus.open import open_consensus
from penstock.consensus.statelog import StateLog
from penstock.consensus.statelog import load as load_log
from penstock.consensus.store import Consensus
from penstock.runtime import leadership, reports
from penstock.runtime.introspection import Introspection
from penstock.runtime.leadership import IfBusy, Led, Watch, claim, leader_of, release, verdict
from penstock.runtime.recovery import RecoveryMachine, recovery_key
from penstock.runtime.reports import ProcessReport, Said, _started, process_of, reporting

TASK = "acme/views"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Consensus]:
    opened = await open_consensus(f"sqlite:///{tmp_path}/consensus.db")
    yield opened
    await opened.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "SILENT_S", 0.6)
    monkeypatch.setattr(leadership, "UNHEARD_S", 0.3)
    monkeypatch.setattr(leadership, "LOOK_S", 0.02)


def elsewhere(beat: float = 0.0) -> ProcessReport:
    """A process of another machine, whose clock may be anything."""
    here = process_of(Introspection(time.time))
    return structs.replace(here, machine="another", beat=beat)


async def lead(store: Consensus, me: ProcessReport, but: str | None = None) -> None:
    await StateLog.lead(store, recovery_key(TASK), RecoveryMachine(), claim=claim(me, but))


async def leader(store: Consensus) -> ProcessReport | None:
    return leader_of((await load_log(store, recovery_key(TASK), RecoveryMachine())).state)


async def say(store: Consensus, process: ProcessReport) -> None:
    log = await StateLog.open(store, reports.REPORTS_KEY, reports.ReportsMachine())
    await log.append(lambda _: Said(process=process))


async def test_of_two_that_come_at_once_one_is_second(store: Consensus) -> None:
    ends = await asyncio.gather(
        *(lead(store, elsewhere()) for _ in range(8)), return_exceptions=True
    )
    assert [type(end) for end in ends].count(Led) == 7
    first = await leader(store)
    assert {end.leader.id for end in ends if isinstance(end, Led)} == {first.id if first else ""}


async def test_a_released_log_is_free_and_that_of_another_is_not_touched(store: Consensus) -> None:
    one, two = elsewhere(), elsewhere()
    await lead(store, one)
    await release(store, TASK, two.id)
    assert await leader(store) == one
    await lead(store, one)  # the same process once more: a session after the other
    await release(store, TASK, one.id)
    assert await leader(store) is None
    await lead(store, two)
    await release(store, TASK, one.id)
    assert await leader(store) == two


async def test_one_of_this_process_lives_as_long_as_it_runs_tasks(store: Consensus) -> None:
    seen = Introspection(time.time)
    me, watch = process_of(seen), Watch(store, TASK)
    async with reporting(store, seen):
        assert await watch.is_alive(me) is True
    assert await watch.is_alive(me) is False


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("ahead_s", [-1e6, 0.0, 1e6], ids=["behind", "equal", "ahead"])
async def test_one_elsewhere_that_was_killed_is_gone_soon_whatever_its_clock_says(
    store: Consensus, ahead_s: float
) -> None:
    killed = elsewhere(beat=time.time() + ahead_s)
    await lead(store, killed)
    await say(store, killed)
    began = time.monotonic()
    assert await Watch(store, TASK).settled(killed) is False
    assert 0.5 < time.monotonic() - began < 10


@pytest.mark.usefixtures("soon")
async def test_one_elsewhere_that_beats_or_writes_lives(store: Consensus) -> None:
    living = elsewhere(beat=1.0)
    await lead(store, living)
    await say(store, living)
    watch = Watch(store, TASK)
    assert await watch.is_alive(living) is None
    await say(store, structs.replace(living, beat=0.5))  # its clock went back: it lives
    assert await watch.is_alive(living) is True
    await lead(store, living)  # its log moves
    assert await watch.is_alive(living) is True


@pytest.mark.usefixtures("soon")
async def test_one_elsewhere_that_says_that_it_ends_is_gone_at_once(store: Consensus) -> None:
    ending = elsewhere(beat=1.0)
    await lead(store, ending)
    await say(store, ending)
    watch = Watch(store, TASK)
    assert await watch.is_alive(ending) is None
    log = await StateLog.open(store, reports.REPORTS_KEY, reports.ReportsMachine())
    await log.append(lambda _: reports.Left(process=ending.id))
    assert await watch.is_alive(ending) is False


@pytest.mark.usefixtures("soon")
async def test_one_that_is_waited_for_is_waited_for_until_it_lets_go(store: Consensus) -> None:
    living = elsewhere()
    await lead(store, living)

    async def live() -> None:
        for beat in range(20):
            await say(store, structs.replace(living, beat=float(beat)))
            await asyncio.sleep(0.05)
        await release(store, TASK, living.id)

    beating = asyncio.create_task(live())
    await Watch(store, TASK).until_free(living)
    assert beating.done()
    assert await leader(store) is None


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.usefixtures("soon")
async def test_one_that_is_suspended_is_given_up_as_one_elsewhere(
    store: Consensus, other: subprocess.Popen[bytes]
) -> None:
    me = process_of(Introspection(time.time))
    living = structs.replace(me, pid=other.pid, started=_started(other.pid))
    await lead(store, living)
    watch = Watch(store, TASK)
    assert await watch.is_alive(living) is True
    other.send_signal(signal.SIGSTOP)
    await watch.until_free(living)
    assert await leader(store) == living
    other.send_signal(signal.SIGCONT)
    async with asyncio.timeout(10):
        while not await watch.is_alive(living):  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)
    other.kill()
    other.wait()
    assert await watch.is_alive(living) is False


@pytest.mark.parametrize(
    ("command", "if_busy", "takes_from_up", "does"),
    [
        ("run", IfBusy.WAIT, False, IfBusy.WAIT),
        ("run", IfBusy.REFUSE, False, IfBusy.REFUSE),
        ("run", IfBusy.REFUSE, True, IfBusy.REFUSE),
        ("run", IfBusy.WAIT, True, IfBusy.WAIT),
        ("run", IfBusy.TAKE_OVER, False, IfBusy.TAKE_OVER),
        ("up", IfBusy.WAIT, False, IfBusy.REFUSE),
        ("up", IfBusy.REFUSE, False, IfBusy.REFUSE),
        ("up", IfBusy.WAIT, True, IfBusy.TAKE_OVER),
        ("up", IfBusy.REFUSE, True, IfBusy.TAKE_OVER),
    ],
)
def test_what_is_done_about_a_living_leader(
    command: str, if_busy: IfBusy, takes_from_up: bool, does: IfBusy
) -> None:
    leads = structs.replace(elsewhere(), command=command)
    assert verdict(leads, if_busy=if_busy, takes_from_up=takes_from_up) is does
