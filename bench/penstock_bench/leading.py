"""A process that leads the tasks of a deployment until it is asked to stop.

It follows the appends of other processes. It stops between two transactions when its standard
input is closed, or on SIGTERM. With `--report` it prints a line of JSON for each transaction.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.batch import StopHandle, make_world, tasks_to_run
from penstock.catalog import desired
from penstock.connectors.builtin import capture, materialization
from penstock.consensus.open import open_consensus
from penstock.runtime.control import Control
from penstock.runtime.kinds import Connect, build_task
from penstock.runtime.supervise import supervise
from penstock_bench.events import settings_in

if TYPE_CHECKING:
    from penstock.runtime.control import TransactionSummary
    from penstock.runtime.session import RunnableTask
    from penstock.settings import Settings


_MODULE: Final = "penstock_bench.leading"


def command(data: Path, *, report: bool = False) -> list[str | Path]:
    """Return the command that leads the deployment in a directory."""
    return [sys.executable, "-m", _MODULE, "--data", data, *(["--report"] if report else [])]


async def lead(settings: Settings, on_progress: Callable[[TransactionSummary], None]) -> None:
    """Lead all tasks of the current catalog; raise what another session would not fix."""
    store = await open_consensus(settings.consensus)
    try:
        catalog = await desired.load(store)
        world = make_world(settings, store)
        handle = StopHandle()
        leads: list[tuple[RunnableTask, Control]] = []
        for spec in tasks_to_run(catalog):
            built = await asyncio.to_thread(
                build_task, catalog, spec, Connect(capture, materialization)
            )
            leads.append((built, Control(on_progress=on_progress)))
            handle.add(leads[-1][1])
        _stop_on_request(handle.stop)
        async with asyncio.TaskGroup() as tasks:
            for built, control in leads:
                tasks.create_task(supervise(built, world, control), name=built.name)
    finally:
        await store.close()


def _stop_on_request(stop: Callable[[], None]) -> None:
    """Call `stop` on SIGTERM, or when standard input is closed."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop)

    def read() -> None:
        # Not through sys.stdin: its lock would still be held when the interpreter exits.
        while os.read(0, 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop has already ended
            loop.call_soon_threadsafe(stop)

    threading.Thread(target=read, name="standard input", daemon=True).start()


def _print(progress: TransactionSummary) -> None:
    line = {"documents": progress.documents, "jobs": progress.jobs, "seconds": progress.seconds}
    print(json.dumps(line), flush=True)  # noqa: T201 - its purpose


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the deployment's directory")
    parser.add_argument("--report", action="store_true", help="print a line for each transaction")
    given = parser.parse_args()
    asyncio.run(lead(settings_in(given.data), _print if given.report else lambda _: None))


if __name__ == "__main__":
    main()
