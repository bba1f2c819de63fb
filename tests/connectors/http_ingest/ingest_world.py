"""An endpoint with something behind it that commits; and deployments whose leaders die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from penstock import failpoints
from penstock.batch import make_world, tasks_to_run
from penstock.catalog import desired
from penstock.catalog.build import load_catalog
from penstock.connectors.builtin import capture, materialization
from penstock.connectors.http_ingest.source import HttpIngest, IngestSession
from penstock.consensus.open import open_consensus
from penstock.journal.blobs import open_blobs
from penstock.journal.journals import Journals
from penstock.journal.reader import CollectionReader
from penstock.journal.rows import to_lines
from penstock.journal.schemas import Schemas
from penstock.model.json_order import Json
from penstock.model.spec import Frozen
from penstock.runtime.connector.capture import CaptureSequence, Idle, Opening, SourceBinding
from penstock.runtime.control import Control
from penstock.runtime.kinds import Connect, build_task
from penstock.runtime.patches import apply_patches
from penstock.runtime.supervise import supervise
from penstock.settings import Settings

Document = dict[str, Any]

SCHEMA: Document = {
    "type": "object",
    "required": ["id"],
    "additionalProperties": False,
    "properties": {"id": {"type": "integer"}, "n": {"type": "integer", "maximum": 9}},
}
WITH_META: Document = {
    **SCHEMA,
    "required": ["id", "_meta"],
    "properties": {**SCHEMA["properties"], "_meta": {"type": "object"}},
}
COLLECTIONS: Document = {
    "acme/orders": {"key": ["/id"], "schema": SCHEMA},
    "acme/traced": {"key": ["/id"], "schema": WITH_META},
}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def bindings(directory: Path) -> tuple[SourceBinding, ...]:
    """Those of `orders` and `traced`, as a connector sees them."""
    file = directory / "collections.json"
    file.write_text(json.dumps({"collections": COLLECTIONS}))
    catalog = load_catalog([file], environ=None)
    made = []
    for index, name in enumerate(COLLECTIONS):
        spec = catalog.collection(name)
        assert spec is not None
        path = name.removeprefix("acme/")
        made.append(
            SourceBinding(
                index=index,
                state_key=f"{path}.v0",
                resource=Frozen({"path": path}),
                collection=spec,
            )
        )
    return tuple(made)


@dataclass
class Endpoint:
    """An endpoint that is open. What is committed survives its sessions."""

    directory: Path
    config: Document = field(default_factory=dict)
    state: Json = field(default_factory=dict)
    committed: list[tuple[str, Document]] = field(default_factory=list)
    sequences: int = 0
    commits: threading.Event = field(default_factory=threading.Event)
    """Not set: sequences are taken, and nothing is committed."""
    polls: threading.Event = field(default_factory=threading.Event)
    """Not set: nothing is taken."""
    port: int = 0
    session: IngestSession | None = None
    patches: list[Json] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.commits.set()
        self.polls.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def admitted(self) -> int:
        """Requests that wait for their commit."""
        return self.session._desk.admitted if self.session else 0

    def post(
        self, path: str, body: object, *, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json", **(headers or {})}
        return httpx.post(f"{self.url}/{path}", content=content, headers=given, timeout=30)

    @contextlib.contextmanager
    def open(self) -> Iterator[Endpoint]:
        """Serve, and commit what comes, as the runtime would."""
        config = {"listen": "127.0.0.1:0", **self.config}
        source = HttpIngest(config, where="capture acme/in")
        made = bindings(self.directory)
        opened = Opening(task="acme/in", bindings=made, state=self.state)
        session = source.open(opened)
        assert isinstance(session, IngestSession)
        self.session, self.port = session, session.port
        self._stop.clear()
        thread = threading.Thread(target=self._run, args=(session, made))
        thread.start()
        try:
            yield self
        finally:
            self.end(thread)

    def end(self, thread: threading.Thread) -> None:
        self._stop.set()
        self.commits.set()
        self.polls.set()
        thread.join()
        assert self.session is not None
        self.session.close()

    def _run(self, session: IngestSession, made: tuple[SourceBinding, ...]) -> None:
        while not self._stop.is_set():
            self.polls.wait()
            polled = session.poll(0.05)
            if polled is Idle.PENDING:
                continue
            assert isinstance(polled, CaptureSequence)
            self.sequences += 1
            self.commits.wait()
            if self._stop.is_set():
                return  # as a crash would have it
            self.state = apply_patches(self.state, polled.patches)
            self.patches += polled.patches
            for given in polled.given:
                metas = given.documents.meta
                for at, text in enumerate(given.documents.texts or ()):
                    document = json.loads(text)
                    if metas is not None:
                        document["_meta"] = metas.slice(at, 1).to_pylist()[0]
                    name = made[given.binding].collection.name
                    self.committed.append((name, document))
            session.acknowledge(1)


# ------------------------------------------------------------------------------------ deployments


@dataclass
class Deployment:
    """A capture of orders, on disk; run by processes that are killed."""

    directory: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def settings(self) -> Settings:
        return Settings.resolve({"data": self.directory / "data"}, {})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/orders"

    def apply(self, config: Document | None = None) -> None:
        listen = f"127.0.0.1:{self.port}"
        file = self.directory / "catalog.json"
        bound = [{"resource": {"path": "orders"}, "target": "acme/orders"}]
        captures = {
            "acme/in": {
                "endpoint": {"ingest": {"listen": listen, **(config or {})}},
                "bindings": bound,
            }
        }
        orders = {"acme/orders": COLLECTIONS["acme/orders"]}
        file.write_text(json.dumps({"collections": orders, "captures": captures}))

        async def apply() -> None:
            store = await open_consensus(self.settings.consensus)
            try:
                await desired.apply(store, load_catalog([file], environ=None))
            finally:
                await store.close()

        asyncio.run(apply())

    async def lead(self, failpoint: str | None) -> None:
        """Run the capture until it is stopped, or dies."""
        store = await open_consensus(self.settings.consensus)
        try:
            catalog = await desired.load(store)
            world = make_world(self.settings, store)
            (spec,) = tasks_to_run(catalog)
            task = build_task(catalog, spec, Connect(capture, materialization))
            control = Control()
            failpoints.arm(failpoint)
            stopping = asyncio.create_task(self._stop_when_asked(control))
            await supervise(task, world, control)
            stopping.cancel()
        finally:
            await store.close()

    async def _stop_when_asked(self, control: Control) -> None:
        while not self.asked.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.02)
        control.stop()

    @property
    def asked(self) -> Path:
        """A file: once it is there, leaders stop."""
        return self.directory / "stop"

    # As a process of its own.

    def start(self, failpoint: str | None = None) -> None:
        command = [sys.executable, "-m", "connectors.http_ingest.ingest_world"]
        command += [str(self.directory), str(self.port), failpoint or ""]
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        log = (self.directory / "leader.log").open("ab")
        with log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,
            )

    def kill(self) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.asked.touch()
        return self.process.wait(60)

    def wait_until_it_serves(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{self.port}/healthz").status_code == 200:
                    return
            assert self.process is None or self.process.poll() is None, self.log()
            time.sleep(0.05)
        raise AssertionError(f"it does not serve: {self.log()}")

    def log(self) -> str:
        return (self.directory / "leader.log").read_text()

    def documents(self) -> list[Document]:
        """What is committed and visible."""
        found: list[Document] = []

        async def read() -> None:
            store = await open_consensus(self.settings.consensus)
            reader = CollectionReader(
                Journals(store), open_blobs(self.settings.blob), Schemas(store), "acme/orders"
            )
            async for rows in reader.read():
                found.extend(json.loads(line) for line in to_lines(rows.batch, rows.root))
            await store.close()

        asyncio.run(read())
        return found


def in_fork(work: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Run in a fork; returns its process."""
    from runtime.forks import begin_anew

    if pid := os.fork():
        return pid
    begin_anew()
    code = 1

    def go() -> None:
        nonlocal code
        try:
            asyncio.run(work())
            code = 0
        except BaseException:
            traceback.print_exc()

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    os._exit(code)


if __name__ == "__main__":
    deployment = Deployment(Path(sys.argv[1]), int(sys.argv[2]))
    asyncio.run(deployment.lead(sys.argv[3] or None))
