"""A process that leads the tasks of a deployment until it is told to stop.

It follows what other processes append. It ends, at a boundary of transactions, when its standard
input is closed or at SIGTERM. With `--told` it prints a line of JSON for each transaction.
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

from penstock.batch import Reins, make_world, materializations
from penstock.bench.events import settings_in
from penstock.catalog import desired
from penstock.connectors.builtin import materialization
from penstock.consensus.open import open_consensus
from penstock.runtime.materialize.build import build
from penstock.runtime.materialize.leader import Control
from penstock.runtime.supervise import supervise

if TYPE_CHECKING:
    from penstock.runtime.materialize.build import Built
    from penstock.runtime.materialize.work import Progress
    from penstock.settings import Settings


_MODULE: Final = "penstock.bench.leading"


def command(data: Path, *, told: bool = False) -> list[str | Path]:
    """What runs it for the deployment in a directory."""
    return [sys.executable, "-m", _MODULE, "--data", data, *(["--told"] if told else [])]


async def lead(settings: Settings, told: Callable[[Progress], None]) -> None:
    """Lead all tasks of the catalog that was applied last; raises what no session would mend."""
    store = await open_consensus(settings.consensus)
    try:
        catalog = await desired.load(store)
        world = make_world(settings, store)
        reins = Reins()
        leads: list[tuple[Built, Control]] = []
        for spec in materializations(catalog):
            built = await asyncio.to_thread(build, catalog, spec, materialization)
            leads.append((built, Control(on_progress=told)))
            reins.add(leads[-1][1])
        _when_told(reins.stop)
        async with asyncio.TaskGroup() as tasks:
            for built, control in leads:
                tasks.create_task(supervise(built, world, control), name=built.name)
    finally:
        await store.close()


def _when_told(stop: Callable[[], None]) -> None:
    """Stop at SIGTERM, or when whoever holds the other end of standard input lets go of it."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop)

    def read() -> None:
        # Not through sys.stdin, whose lock would be held when the interpreter ends.
        while os.read(0, 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop has ended before
            loop.call_soon_threadsafe(stop)

    threading.Thread(target=read, name="standard input", daemon=True).start()


def _print(progress: Progress) -> None:
    said = {"documents": progress.documents, "jobs": progress.jobs, "seconds": progress.seconds}
    print(json.dumps(said), flush=True)  # noqa: T201 - what was asked for


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the deployment's directory")
    parser.add_argument("--told", action="store_true", help="print a line for each transaction")
    given = parser.parse_args()
    asyncio.run(lead(settings_in(given.data), _print if given.told else lambda _: None))


if __name__ == "__main__":
    main()
