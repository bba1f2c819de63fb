"""Children: started again when they end, ended with their parent, however that ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from penstock.errors import Unavailable
from penstock.servicekit import children
from penstock.servicekit.children import Child

SOON_S = 30.0

SERVES = """
import os, sys, threading
print(f"listening on {os.getpid()}", flush=True)
sys.stdin.read()
"""
"""As `penstock.cli.child` does: it ends with its standard input."""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def made(code: str) -> Child:
    return Child("a child", [sys.executable, "-c", code], dict(os.environ))


@pytest.fixture
async def child() -> AsyncIterator[Child]:
    one = made(SERVES)
    yield one
    await one.stop()


async def test_a_child_that_is_killed_is_started_again(child: Child) -> None:
    assert await child.start() == f"listening on {child.pid}"
    keeping = asyncio.create_task(child.keep())
    for _ in range(2):
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda first=first: child.pid not in (None, first))  # type: ignore[misc]
        await until(lambda: child.said == f"listening on {child.pid}")
    last = child.pid
    await child.stop()
    await asyncio.wait_for(keeping, SOON_S)  # and not once more
    assert last is not None
    assert not is_alive(last)


async def test_one_that_does_not_start_is_an_error_with_its_exit_code() -> None:
    one = made("import sys; sys.exit(7)")
    with pytest.raises(Unavailable, match="a child has not started") as error:
        await one.start()
    assert "exit code 7" in str(error.value)
    await one.stop()


async def test_one_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "STOP_S", 0.5)
    one = made(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('stays', flush=True)\n"
        "time.sleep(600)\n"
    )
    await one.start()
    pid = one.pid
    assert pid is not None
    await one.stop()
    assert not is_alive(pid)


async def test_what_it_says_later_holds_it_up_by_nothing() -> None:
    one = made("print('ready', flush=True)\nprint('x' * 1_000_000, flush=True)")
    assert await one.start() == "ready"
    await until(lambda: one.pid is None)
    await one.stop()


def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, sys\n"
        "from penstock.servicekit.children import Child\n"
        "async def main():\n"
        "    child = Child('c', [sys.executable, '-c', sys.argv[1]], dict(os.environ))\n"
        "    await child.start()\n"
        "    print(child.pid, flush=True)\n"
        "    await child.keep()\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, SERVES], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + SOON_S
    while is_alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
