"""Opens the store that a URL names.

    sqlite:///penstock.db            a file, relative; four slashes for an absolute path
    postgresql://user:pw@host/db     a database, with libpq's options
    grpc://host:6882                 a committer in another process (`penstock persistd`)
    grpc+unix:///run/p/p.sock        one on this host, behind a Unix socket
    memory:                          nothing durable, for tests

The first two and the last embed a committer in this process; its own traffic does not use a socket.
"""

from __future__ import annotations

import asyncio
import difflib
import enum
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.consensus.backend import Backend, PoolOptions
from penstock.consensus.store import Consensus, ConsensusError
from penstock.errors import Unavailable, UsageError
from penstock.servicekit.secrets import conceal_url, mask_url

if TYPE_CHECKING:
    from penstock.consensus.committer.client import RpcOptions
    from penstock.consensus.committer.options import CommitterOptions

_QUIET_S = 60.0
"""Interval between signs of life that nobody needs."""

RETRY_S = 1.0
"""Interval between attempts to open a store that is not there yet."""

PROBE_S = 2.0
"""How long a probe waits: a user is watching, and a running committer answers in milliseconds."""


class Scheme(enum.Enum):
    """Kinds of store that a URL may name."""

    MEMORY = "memory"
    SQLITE = "sqlite"
    POSTGRESQL = "postgresql"
    GRPC = "grpc"

    @property
    def example(self) -> str:
        return _EXAMPLES[self]


_EXAMPLES = {
    Scheme.MEMORY: "memory:",
    Scheme.SQLITE: "sqlite:///penstock.db",
    Scheme.POSTGRESQL: "postgresql://user:password@host:5432/database",
    Scheme.GRPC: "grpc://host:6882",
}
_ALIASES = {"postgres": Scheme.POSTGRESQL, "grpc+unix": Scheme.GRPC}  # libpq reads the first too


def scheme_of(url: str) -> Scheme:
    """Return the kind of store that `url` names; a `UsageError` with a suggestion if unknown."""
    match = re.match(r"[A-Za-z][A-Za-z0-9+.-]*(?=:)", url)
    if match is None:
        raise UsageError(
            f"this is not a consensus URL: {mask_url(url)!r}",
            fix=f"for a file, write sqlite:///{mask_url(url) or 'penstock.db'}",
        )
    name = match[0].lower()
    known = {scheme.value: scheme for scheme in Scheme} | _ALIASES
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    meant = f"did you mean {known[near[0]].example}? " if near else ""
    raise UsageError(
        f"unknown scheme {name!r} in the consensus URL",
        where=mask_url(url),
        fix=f"{meant}known are {', '.join(scheme.example for scheme in Scheme)}",
    )


def sqlite_path(url: str) -> Path:
    """Return the file of a `sqlite:///` URL."""
    prefix, separator, path = url.partition(":///")
    if prefix.lower() != "sqlite" or not separator or not path or path.startswith(":memory:"):
        raise UsageError(
            "the SQLite URL names no file",
            where=mask_url(url),
            fix=f"write {Scheme.SQLITE.example}, or {Scheme.MEMORY.example} for tests",
        )
    if "?" in path or "\0" in path:
        raise UsageError(
            "a SQLite URL has no options", where=mask_url(url), fix="leave out what follows `?`"
        )
    return Path(path)


async def open_backend(url: str, pool: PoolOptions | None = None) -> Backend:
    """Open the durable store itself, creating its schema if missing; not for `grpc://`.

    Raises `UsageError` or `UserError` if waiting will not help, `Unavailable` otherwise.
    """
    conceal_url(url)
    match scheme_of(url):
        case Scheme.MEMORY:
            from penstock.consensus.memory import MemoryBackend

            return MemoryBackend()
        case Scheme.SQLITE:
            from penstock.consensus.sqlite import SqliteBackend

            return await SqliteBackend.open(sqlite_path(url))
        case Scheme.POSTGRESQL:
            from penstock.consensus.postgres import PostgresBackend

            return await PostgresBackend.open(url, pool)
        case Scheme.GRPC:
            raise UsageError(
                "a committer needs a database, not another committer",
                where=mask_url(url),
                fix=f"write {Scheme.POSTGRESQL.example} or {Scheme.SQLITE.example}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsensusOptions:
    """Options for opening a store; None stands for defaults."""

    committer: CommitterOptions | None = None
    """Options of an embedded committer."""
    rpc: RpcOptions | None = None
    """Deadlines of a connection to a committer in another process."""
    pool: PoolOptions = field(default_factory=PoolOptions)
    wait_s: float = 0.0
    """How long to keep trying while the database is unavailable: it may be starting."""
    waiting: Callable[[Unavailable], None] = lambda _: None
    """Called after every failed attempt, so that a user sees that it waits."""


async def open_consensus(url: str, options: ConsensusOptions | None = None) -> Consensus:
    """Open the store that `url` names.

    A database is opened at once, and its schema created if missing; a committer in another process
    is dialled by the first call, since it may be restarting.
    """
    options = options or ConsensusOptions()
    conceal_url(url)
    if scheme_of(url) is Scheme.GRPC:
        from penstock.consensus.committer.client import RpcConsensus

        return RpcConsensus(url, options.rpc)
    from penstock.consensus.committer.committer import PersistCommitter
    from penstock.consensus.committer.inprocess import InProcessConsensus

    backend = await _open_patiently(url, options)
    committer = PersistCommitter(backend, options.committer or _alone())
    try:
        await committer.open()
    except BaseException:
        await committer.close()
        raise
    return InProcessConsensus(committer)


def _alone() -> CommitterOptions:
    """Return the options of a committer whose only client is this process.

    It needs no sign that the committer is alive; hundreds of idle tasks would be woken for it.
    """
    from penstock.consensus.committer.options import CommitterOptions, StreamOptions

    return CommitterOptions(streams=StreamOptions(progress_s=_QUIET_S))


async def _open_patiently(url: str, options: ConsensusOptions) -> Backend:
    deadline = time.monotonic() + options.wait_s
    while True:
        try:
            return await open_backend(url, options.pool)
        except Unavailable as error:
            if time.monotonic() + RETRY_S > deadline:
                raise
            options.waiting(error)
            await asyncio.sleep(RETRY_S)


def probe(url: str) -> str:
    """Return a sentence about the store for `penstock doctor`; changes and creates nothing."""
    conceal_url(url)
    match scheme_of(url):
        case Scheme.MEMORY:
            return "in memory: nothing outlives the process"
        case Scheme.SQLITE:
            from penstock.consensus.sqlite import SqliteBackend

            return SqliteBackend.probe(sqlite_path(url))
        case Scheme.POSTGRESQL:
            from penstock.consensus.postgres import PostgresBackend

            return asyncio.run(PostgresBackend.probe(url))
        case Scheme.GRPC:
            return asyncio.run(_probe_committer(url))


async def _probe_committer(url: str) -> str:
    from penstock.consensus.committer.client import RpcOptions

    store = await open_consensus(url, ConsensusOptions(rpc=RpcOptions(read_s=PROBE_S)))
    try:
        incarnation = await store.incarnation()
    except ConsensusError as error:
        raise Unavailable(
            "the committer does not answer",
            where=mask_url(url),
            why=error.message,
            fix="start it with: penstock persistd --consensus … --listen …",
        ) from error
    finally:
        await store.close()
    return f"{mask_url(url)} serves store {incarnation.hex()[:8]}"
