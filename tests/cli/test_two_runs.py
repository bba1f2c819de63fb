"""Two processes that would run the same task, as real processes: one runs it, and none is ended."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import sqlite3
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from msgspec import structs

from penstock.consensus.open import open_consensus
from penstock.consensus.statelog import StateLog
from penstock.consensus.statelog import load as load_log
from penstock.runtime import leadership
from penstock.runtime.recovery import RecoveryMachine, recovery_key
from penstock.runtime.reports import ProcessReport

pytestmark = pytest.mark.timeout(300)

SOON_S = 60.0
"""Generous, on a machine that does much else."""

TASK = "acme/views"
KEY = recovery_key(TASK)

CATALOG = """
collections:
  acme/events:
    key: [/id]
    schema: {type: object, required: [id], properties: {id: {type: integer}}}
materializations:
  acme/views:
    endpoint:
      connector:
        image: penstock/materialize-sqlite
        config: {path: views.db, busyTimeout: 600}
    bindings:
      - {source: acme/events, resource: {table: events}}
"""


@dataclass
class Command:
    """A command that runs, and what it said so far."""

    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        return self.log.read_text()

    def until_said(self, text: str) -> None:
        eventually(lambda: text in self.said() or self.ended, self.said)
        assert text in self.said()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def code(self) -> int:
        return self.process.wait(SOON_S)


def eventually(found: Callable[[], object], what: Callable[[], str]) -> None:
    until = time.monotonic() + SOON_S
    while not found():
        assert time.monotonic() < until, what()
        time.sleep(0.05)


@dataclass
class Here:
    directory: Path

    @contextlib.contextmanager
    def command(self, *arguments: str) -> Iterator[Command]:
        log = self.directory / f"{arguments[0]}-{time.monotonic_ns()}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock", *arguments],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        try:
            yield Command(process, log)
        finally:
            process.kill()
            process.wait()

    def done(self, *arguments: str) -> str:
        with self.command(*arguments) as command:
            assert command.code() == 0, command.said()
            return command.said()

    @contextlib.contextmanager
    def held(self) -> Iterator[sqlite3.Connection]:
        """Within this, or until its transaction ends, nobody gets further than to the endpoint."""
        path = self.directory / "views.db"
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("PRAGMA journal_mode = WAL")
            other.execute("BEGIN IMMEDIATE")
            yield other

    def leader(self) -> ProcessReport | None:
        async def look() -> ProcessReport | None:
            store = await open_consensus(f"sqlite:///{self.directory}/.penstock/consensus.db")
            try:
                return leadership.leader_of((await load_log(store, KEY, RecoveryMachine())).state)
            finally:
                await store.close()

        return asyncio.run(look())

    def until_led_by(self, command: Command) -> None:
        def leads() -> bool:
            leader = self.leader()
            return command.ended or (leader is not None and leader.pid == command.process.pid)

        eventually(leads, command.said)
        assert not command.ended, command.said()


@pytest.fixture
def here(tmp_path: Path) -> Here:
    (tmp_path / "catalog.yaml").write_text(CATALOG)
    place = Here(tmp_path)
    place.done("apply", "catalog.yaml")
    return place


def test_the_second_waits_for_the_first_and_says_so(here: Here) -> None:
    with here.held() as other, here.command("run") as first:
        here.until_led_by(first)
        with here.command("run") as second:
            second.until_said(f"waits for penstock run, process {first.process.pid} on ")
            other.execute("ROLLBACK")
            assert (first.code(), second.code()) == (0, 0), second.said()
    assert here.leader() is None
    assert "taken over" not in first.said() + second.said()


def test_the_second_refuses_if_asked_to_and_the_first_goes_on(here: Here) -> None:
    with here.held() as other, here.command("run") as first:
        here.until_led_by(first)
        with here.command("run", "--if-busy", "refuse") as second:
            assert second.code() == 1
        assert f"{TASK} is being run by another penstock run" in second.said()
        assert f"process {first.process.pid} on " in second.said()
        other.execute("ROLLBACK")
        assert first.code() == 0, first.said()


@pytest.mark.parametrize("when", ["before", "while it waits"])
def test_a_first_that_was_killed_blocks_nobody(here: Here, when: str) -> None:
    with here.held() as other, here.command("run") as first:
        here.until_led_by(first)
        if when == "before":
            os.kill(first.process.pid, signal.SIGKILL)
            first.process.wait()
            other.execute("ROLLBACK")
            said = here.done("run", "--if-busy", "refuse")
            assert "waits for" not in said
            return
        with here.command("run") as second:
            second.until_said("waits for penstock run")
            other.execute("ROLLBACK")
            os.kill(first.process.pid, signal.SIGKILL)
            assert second.code() == 0, second.said()


def test_a_run_that_is_fenced_all_the_same_says_what_happened(here: Here) -> None:
    async def take_over(leader: ProcessReport) -> None:
        store = await open_consensus(f"sqlite:///{here.directory}/.penstock/consensus.db")
        other = structs.replace(leader, id="another")  # of a process that will have ended, too
        claim = leadership.claim(other, leader.id)
        await StateLog.lead(store, KEY, RecoveryMachine(), claim=claim)
        await store.close()

    with here.held() as other, here.command("run") as first:
        here.until_led_by(first)
        leader = here.leader()
        assert leader is not None
        asyncio.run(take_over(leader))
        other.execute("ROLLBACK")
        assert first.code() == 1
    assert (
        f"{TASK} was taken over by another penstock run. Nothing is lost; do not run it twice at "
        "once." in first.said()
    )
    here.done("run")


# ------------------------------------------------------------------------------ beside penstock up


def test_up_waits_for_a_run_and_a_run_elsewhere_leaves_tasks_to_up(here: Here) -> None:
    data = here.directory / ".penstock"
    stores = ("--consensus", f"sqlite:///{data}/consensus.db", "--blob", f"{data}/blobs")
    with here.held() as other, here.command("run") as run:
        here.until_led_by(run)
        with here.command("up") as up:
            up.until_said(f"waits for penstock run, process {run.process.pid} on ")
            assert not run.ended
            other.execute("ROLLBACK")
            assert run.code() == 0, run.said()
            here.until_led_by(up)
            with here.command("run", "--data", "elsewhere", *stores) as second:
                assert second.code() == 1
            assert f"penstock up runs {TASK}" in second.said()
            here.done("run", "--data", "elsewhere", *stores, "--take-over")
            assert not up.ended
            up.process.send_signal(signal.SIGTERM)
            assert up.code() == 0, up.said()
    here.done("run", "--if-busy", "refuse")


# --------------------------------------------------------------------------------------- with Spark


@pytest.mark.spark
def test_two_that_start_at_once_store_everything_once(here: Here) -> None:
    documents = here.directory / "documents.jsonl"
    documents.write_text("".join(json.dumps({"id": n}) + "\n" for n in range(1000)))
    here.done("append", "acme/events", str(documents))
    with here.command("run", "--json") as first, here.command("run", "--json") as second:
        codes = (first.code(), second.code())
    said = first.said() + second.said()
    assert codes == (0, 0), said
    assert said.count('"documents": 1000,') == 1
    assert said.count('"documents": 0,') == 1
    with contextlib.closing(sqlite3.connect(here.directory / "views.db")) as database:
        assert database.execute("SELECT count(*), sum(id) FROM events").fetchone() == (1000, 499500)


# -------------------------------------------------------------------------------- on a terminal


def test_a_terminal_shows_a_line_for_each_task(here: Here) -> None:
    """In eighty columns, with what the task waits for."""
    terminal, its_end = pty.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    shown = bytearray()

    def look() -> str:
        while select.select([terminal], [], [], 0)[0]:
            shown.extend(os.read(terminal, 1 << 16))
        return shown.decode(errors="replace")

    with here.held() as other:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "run"],
            cwd=here.directory,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
            stdin=its_end,
            stdout=its_end,
            stderr=its_end,
        )
        try:
            waits = f"{TASK}  waits for another process that writes to"
            eventually(lambda: waits in look(), look)
            assert "WARNING" not in look(), "the table says it"
            other.execute("ROLLBACK")
            eventually(lambda: f"{TASK}: nothing new" in look(), look)
            assert process.wait(SOON_S) == 0
        finally:
            process.kill()
            process.wait()
            os.close(its_end)
            os.close(terminal)
