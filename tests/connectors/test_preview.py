"""Previews whose process is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

from connectors.places import PostgresPlace
from penstock.testing.connector_suite import SUMS, paths
from penstock.testing.sink_harness import SqlPlace

KILLED = """
import json, sys, time
from penstock.testing.connector_suite import SUMS
from penstock.testing.sink_harness import SinkRun, build_sink
from penstock.connectors.postgres.sink import Postgres
from penstock.connectors.sqlite.sink import Sqlite
from pathlib import Path
directory, kind, config = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
connector = {"sqlite": Sqlite, "postgres": Postgres}[kind](config, where="x")
with connector.preview([connector.path({"table": "t"})]) as preview:
    what = build_sink(directory, [SUMS], lambda *_: preview, config=config, name="acme/preview")
    run = SinkRun.start(what, epoch=1)
    run.transaction([{"k": 1, "n": 1}])
    print("ready", flush=True)
    time.sleep(600)
"""


def test_what_a_killed_preview_leaves_is_removed_by_the_next(place: SqlPlace) -> None:
    kind = "postgres" if isinstance(place, PostgresPlace) else "sqlite"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(place.directory), kind, json.dumps(place.config)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with place.connector().preview(paths(place, SUMS)):
            left = place.previews()
        theirs = [name for name in place.previews() if name in left]
        assert theirs, "it lives: nothing of it is removed"
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    assert [name for name in place.previews() if name in theirs]
    for _ in range(100):  # a server notices a lost client in a moment
        with place.connector().preview(paths(place, SUMS)):
            pass
        if not place.previews():
            break
    assert place.previews() == []
