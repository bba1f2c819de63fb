"""Whose work this is: sets threads, Spark's pool, job group and tags apart by domain.

Tasks of both domains share one process and one SparkSession. What a domain does in threads runs in
threads of its own, so that hundreds of busy captures leave those of a derivation alone, and the
other way round. Its Spark jobs run in its pool (`fairscheduler.xml`), for the same reason.

Spark keeps pool, group and tags with a thread, and threads are used again: what is set for a call
is cleared after it, or the next one would be counted, and cancelled, as somebody else's.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.errors import Bug
from penstock.model.domain import Domain

if TYPE_CHECKING:
    from pyspark import SparkContext

SYSTEM: Final = "system"
"""The pool of work that is nobody's: upkeep, and commands."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work:
    """Whose work it is that runs."""

    domain: Domain | None = None
    dataflow_id: int | None = None
    """Known if a cluster runs it."""

    @property
    def pool(self) -> str:
        return SYSTEM if self.domain is None else self.domain.value

    @property
    def tags(self) -> list[str]:
        tags = [f"penstock.domain.{self.pool}"]
        return tags if self.dataflow_id is None else [*tags, f"penstock.df.{self.dataflow_id}"]


_WORK: ContextVar[Work] = ContextVar("penstock-work", default=Work())  # noqa: B039 - frozen
_held = threading.local()


@contextlib.contextmanager
def working_for(work: Work) -> Iterator[None]:
    """Within this, what is called is part of `work`, in tasks and threads begun here as well."""
    token = _WORK.set(work)
    try:
        yield
    finally:
        _WORK.reset(token)


@contextlib.contextmanager
def spark_scope(context: SparkContext, *, group: str, description: str) -> Iterator[None]:
    """Within this, and in this thread, jobs have this group, and the pool and tags of their work.

    Whatever happens, the thread has none of them afterwards.
    """
    if getattr(_held, "group", None) is not None:
        raise Bug(f"a thread runs jobs of {_held.group}, and is to run those of {group}")
    work = _WORK.get()
    _held.group = group
    try:
        context.setJobGroup(group, description, interruptOnCancel=True)
        context.setLocalProperty("spark.scheduler.pool", work.pool)
        for tag in work.tags:
            context.addJobTag(tag)
        yield
    finally:
        _held.group = None
        java: Any = context._jsc  # noqa: SLF001 - PySpark cannot clear a group or a property
        for tag in work.tags:  # others are of the process that this one borrows Spark from
            context.removeJobTag(tag)
        java.setLocalProperty("spark.scheduler.pool", None)
        java.clearJobGroup()


class DomainThreads(ThreadPoolExecutor):
    """The default executor of an event loop (`asyncio.to_thread`): threads of each domain's own."""

    def __init__(self, threads: int | None = None) -> None:
        """`threads` is for each domain: enough to keep all cores busy while some wait for disks."""
        super().__init__(1)  # of its own threads none is started: `submit` never comes here
        count = threads or 2 * (os.cpu_count() or 1) + 8
        self._pools = {
            name: ThreadPoolExecutor(count, thread_name_prefix=f"penstock-{name}")
            for name in (*(domain.value for domain in Domain), SYSTEM)
        }

    def submit(self, call: Callable[..., T], /, *args: Any, **options: Any) -> Future[T]:  # noqa: ANN401
        return self._pools[_WORK.get().pool].submit(call, *args, **options)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=cancel_futures)
        for pool in self._pools.values():
            pool.shutdown(wait=wait, cancel_futures=cancel_futures)
