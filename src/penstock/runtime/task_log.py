"""Keeps what a task logs as documents of `ops/logs`, too.

Records go to standard error as always. Those that are logged while a task runs, in its own code or
below it, are collected beside that and appended to the task's journal, a few seconds later and in
transactions of their own: what a task says of its troubles must not be lost with the transaction
that has them. A store that fails loses them, and standard error says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Final

from penstock.errors import PenstockError
from penstock.journal.planning import Planner
from penstock.journal.publisher import Fixed, Publisher
from penstock.journal.schemas import layout
from penstock.model.clock import Clock, Producer
from penstock.model.json_order import Json
from penstock.native.arrow import to_arrow
from penstock.runtime import ops
from penstock.servicekit.secrets import REDACTED, mask, sounds_secret

FLUSH_S: Final = 2.0
RECORDS_MAX: Final = 10_000
"""Kept until the next flush; of more, the oldest are lost."""

LEVELS: Final = {
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
}
"""Levels as a catalog spells them."""

_TASK: ContextVar[tuple[ops.TaskKindName, str] | None] = ContextVar("penstock-task", default=None)
_log = logging.getLogger("penstock.runtime")


class _Collector(logging.Handler):
    """Keeps the records of one task, from any thread."""

    def __init__(self, kind: ops.TaskKindName, task: str, level: int) -> None:
        super().__init__(level)
        self._kind = kind
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._documents: deque[dict[str, Json]] = deque(maxlen=RECORDS_MAX)
        self.has_some = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if _TASK.get() != (self._kind, self._task):
            return
        instant = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        document: dict[str, Json] = {
            "shard": {"kind": self._kind, "name": self._task},
            "ts": instant.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "message": mask(record.getMessage()),
        }
        said = getattr(record, "fields", None)
        if isinstance(said, dict) and said:
            document["fields"] = {
                name: REDACTED if sounds_secret(name) else _plain(value)
                for name, value in said.items()
            }
        self._documents.append(document)
        if not self.has_some.is_set():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody takes it any more
                self._loop.call_soon_threadsafe(self.has_some.set)

    def take(self) -> list[dict[str, Json]]:
        self.has_some.clear()  # first: what another thread adds from here on sets it again
        return [self._documents.popleft() for _ in range(len(self._documents))]


def _plain(value: object) -> Json:
    return value if isinstance(value, bool | int | float | None) else mask(str(value))


@contextlib.asynccontextmanager
async def task_log(
    planner: Planner,
    *,
    kind: ops.TaskKindName,
    task: str,
    level: int,
    now: Callable[[], Clock],
    entropy: Callable[[int], bytes],
) -> AsyncIterator[None]:
    """Within this, the task's log is kept; within another one of the same task, by that one."""
    if _TASK.get() == (kind, task):
        yield
        return
    collector = _Collector(kind, task, level)
    root = logging.getLogger("penstock")
    root.addHandler(collector)
    token = _TASK.set((kind, task))
    writer = _Writer(planner, collector, kind=kind, task=task, now=now, entropy=entropy)
    flushing = asyncio.create_task(writer.run(), name="task log")
    try:
        yield
    finally:
        _TASK.reset(token)
        root.removeHandler(collector)
        writer.end()
        with contextlib.suppress(asyncio.CancelledError):
            # A flush that is under way has taken its records: a stop of the task must not end it.
            await asyncio.shield(flushing)
        await flushing


class _Writer:
    """Appends what was collected."""

    def __init__(
        self,
        planner: Planner,
        collector: _Collector,
        *,
        kind: ops.TaskKindName,
        task: str,
        now: Callable[[], Clock],
        entropy: Callable[[int], bytes],
    ) -> None:
        self._planner = planner
        self._collector = collector
        self._journal = ops.journal_of(ops.LOGS, kind=kind, task=task)
        self._now = now
        self._entropy = entropy
        self._root = layout(ops.LOGS.write_schema.text)
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Flush for the last time."""
        self._ending.set()
        self._collector.has_some.set()

    async def run(self) -> None:
        """Flush a moment after something was collected, and for the last time when the log ends."""
        while not self._ending.is_set():
            await self._collector.has_some.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._ending.wait()
            await self.flush()
        await self.flush()  # the end may have come during the one before

    async def flush(self) -> None:
        """Append what was collected; log and drop what cannot be appended."""
        documents = self._collector.take()
        if not documents:
            return
        try:
            await self._planner.journals.create(self._journal)
            publisher = Publisher(
                self._planner.journals,
                self._planner.blobs,
                self._planner.schemas,
                [Fixed(spec=ops.LOGS, journal=str(self._journal))],
                producer=Producer.from_random(self._entropy(6)),
                now=self._now,
            )
            await publisher.publish(0, to_arrow(documents, self._root))
            await publisher.commit_now()
        except PenstockError as error:
            _log.warning("%d records of a task's log are lost: %s", len(documents), error.what)
