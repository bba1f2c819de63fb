"""The standalone committer: one process in front of the consensus database.

It logs what it was asked to do, waits for the database for as long as it takes, then listens and
serves, and on SIGTERM finishes what is under way. It never exits because a database is late: that
would race its supervisor. Intended exits have their own exit code and no stack trace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from penstock import __version__
from penstock.consensus.backend import Backend, PoolOptions
from penstock.consensus.committer.committer import PersistCommitter
from penstock.consensus.committer.metrics import CommitterMetrics, StatsLine
from penstock.consensus.committer.options import CommitterOptions
from penstock.consensus.committer.recovery import Healer, Recover
from penstock.consensus.committer.service import ConsensusService
from penstock.consensus.open import Scheme, open_backend, scheme_of
from penstock.consensus.store import ConsensusError, cause_chain
from penstock.errors import PenstockError, Unavailable, UsageError
from penstock.servicekit.admin import application, serving
from penstock.servicekit.logs import fields
from penstock.servicekit.readiness import Readiness
from penstock.servicekit.rpc.address import (
    DEFAULT_PORT,
    dial_target,
    parse_listen,
    register_listener,
    socket_of,
)
from penstock.servicekit.rpc.backoff import RECONNECT_CLAMP_S, Backoff
from penstock.servicekit.rpc.grpcio import aio, grpc
from penstock.servicekit.rpc.listener import (
    bind_server,
    check_certificate,
    is_exposed,
    open_tokens,
    server_credentials,
    server_options,
)
from penstock.servicekit.rpc.tokens import TokenFile
from penstock.servicekit.secrets import mask_url
from penstock.servicekit.signals import at_stop_signals

log = logging.getLogger("penstock.consensus.persistd")

DEFAULT_ADMIN_PORT = 6883
"""The port after the committer's own."""

_DRAIN_S = 10.0
_STOP_S = 1.0


T = TypeVar("T")


class _Stopped(Exception):
    """Stopped while still waiting for the backend."""


class StoreLost(PenstockError):
    """The schema is gone, and this daemon must not create it again."""

    exit_code = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistdOptions:
    """Options of `penstock persistd`."""

    consensus: str
    listen: str = f"127.0.0.1:{DEFAULT_PORT}"
    admin_port: int = DEFAULT_ADMIN_PORT
    committer: CommitterOptions = field(default_factory=CommitterOptions)
    pool: PoolOptions = field(default_factory=PoolOptions)
    stats_interval_s: float = 30.0
    """Interval between stats lines; 0 for none."""
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    allow_plaintext: bool = False
    self_heal: bool = True

    def __post_init__(self) -> None:
        if self.socket is None:
            parse_listen(self.listen)
        elif self.tls_cert is not None:
            raise UsageError(
                "TLS has no use on a Unix socket",
                why="what goes through it does not leave this host",
                fix="leave out --tls-cert and --tls-key",
            )
        if scheme_of(self.consensus) is Scheme.GRPC:
            raise UsageError(
                "a committer needs a database, not another committer",
                where=mask_url(self.consensus),
                fix=f"write {Scheme.POSTGRESQL.example} or {Scheme.SQLITE.example}",
            )
        check_certificate(self.tls_cert, self.tls_key)
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise UsageError("--tls-client-ca needs --tls-cert and --tls-key")
        if self.exposed and not self.allow_plaintext:
            raise UsageError(
                f"refusing to listen on {self.listen} without both TLS and tokens",
                why="anyone who reaches the port could read and write everything",
                fix="add --token-file, --tls-cert and --tls-key, listen on 127.0.0.1, or say "
                "--insecure-allow-plaintext",
            )

    @property
    def exposed(self) -> bool:
        return is_exposed(
            self.listen, tls=self.tls_cert is not None, tokens=self.token_file is not None
        )

    @property
    def socket(self) -> Path | None:
        return socket_of(self.listen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Addresses at which the daemon can be reached."""

    address: str
    admin: str


class Persistd:
    """The daemon. `run` returns after `stop`, which may be called from a signal handler."""

    def __init__(self, options: PersistdOptions) -> None:
        self._options = options
        self._stopping = asyncio.Event()
        self._lost: StoreLost | None = None
        self._committer: PersistCommitter | None = None
        self._metrics = CommitterMetrics()

    def stop(self) -> None:
        self._stopping.set()

    async def run(self, announce: Callable[[Bound], None]) -> None:
        """Serve until stopped; `announce` is called once clients can connect.

        Raises `UserError` for mistakes that waiting does not cure, `StoreLost` if the schema is
        gone.
        """
        options = self._options
        log.info(
            "persistd starting",
            extra=fields(
                listen=options.listen, consensus=mask_url(options.consensus), version=__version__
            ),
        )
        tokens = open_tokens(options.token_file)
        credentials = server_credentials(options.tls_cert, options.tls_key, options.tls_client_ca)
        async with self._admin() as admin:
            try:
                backend = await self._patiently(self._open_backend)
            except _Stopped:
                return
            committer = PersistCommitter(
                backend, options.committer, metrics=self._metrics, recover=self._recovery()
            )
            try:
                await self._patiently(committer.open)
                self._committer = committer
                log.info("consensus backend ready", extra=fields(url=backend.url))
                await self._serve(committer, tokens, credentials, admin, announce)
            except _Stopped:
                return
            finally:
                await committer.close()
        if self._lost is not None:
            raise self._lost

    async def _serve(
        self,
        committer: PersistCommitter,
        tokens: TokenFile | None,
        credentials: grpc.ServerCredentials | None,
        admin: str,
        announce: Callable[[Bound], None],
    ) -> None:
        options = self._options
        server = aio.server(options=server_options(options.committer.limits.message_bytes_max))
        server.add_generic_rpc_handlers([ConsensusService(committer, tokens=tokens).handler()])
        with (
            bind_server(server, options.listen, credentials, tokens=tokens) as (host, port),
            register_listener(host, port),
        ):
            await server.start()
            address = dial_target(host, port)
            log.info("persistd listening", extra=fields(address=address, admin=admin))
            announce(Bound(address=address, admin=admin))
            stats = asyncio.create_task(self._report(), name="stats")
            await self._stopping.wait()
            stats.cancel()
            log.info("persistd stopping", extra=fields(inflight=committer.admission.inflight))
            await self._drain(committer)
            await server.stop(_STOP_S)
        log.info("persistd stopped")

    async def _drain(self, committer: PersistCommitter) -> None:
        """Refuse new operations, determinately; let those under way finish and be answered."""
        committer.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                await committer.admission.emptied()
        await asyncio.sleep(0.05)  # the last answers are still being written

    # ------------------------------------------------------------------------------- backend

    async def _open_backend(self) -> Backend:
        return await open_backend(self._options.consensus, self._options.pool)

    async def _patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt`, tried until it succeeds; `_Stopped` if stopped before."""
        backoff = Backoff(clamp_s=RECONNECT_CLAMP_S)
        while not self._stopping.is_set():
            try:
                return await self._unless_stopped(attempt)
            except (Unavailable, ConsensusError) as error:
                log.warning(
                    "waiting for consensus backend",
                    extra=fields(
                        url=mask_url(self._options.consensus),
                        attempt=backoff.attempts + 1,
                        error=cause_chain(error),
                    ),
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff.next_s()):
                    await self._stopping.wait()
        raise _Stopped

    async def _unless_stopped(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt`; a stop cancels it, as the database may stay locked."""
        trying = asyncio.ensure_future(attempt())
        stopping = asyncio.ensure_future(self._stopping.wait())
        both: list[asyncio.Future[Any]] = [trying, stopping]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not trying.done():
                trying.cancel()
                await asyncio.wait([trying])
        if trying.cancelled():
            raise _Stopped
        return trying.result()

    def _recovery(self) -> Recover:
        if self._options.self_heal:
            return Healer(self._open_backend)
        return self._give_up

    async def _give_up(self, _: Backend, error: ConsensusError) -> Backend:
        self._lost = StoreLost(
            "the consensus store is gone",
            where=mask_url(self._options.consensus),
            why=error.message,
            fix="restore the database, or start with --self-heal to begin with an empty store",
        )
        self.stop()
        raise error

    # ---------------------------------------------------------------------------- reporting

    @contextlib.asynccontextmanager
    async def _admin(self) -> AsyncIterator[str]:
        def readiness() -> Readiness:
            if self._committer is None:
                return Readiness(False, "waiting for the consensus backend")
            return self._committer.readiness()

        app = application(self._metrics.registry, readiness)
        try:
            async with serving(app, self._options.admin_port) as port:
                yield f"http://127.0.0.1:{port}"
        except OSError as error:
            raise Unavailable(
                f"cannot serve the admin page on port {self._options.admin_port}",
                why=error.strerror or str(error),
                fix="choose another with --admin-port, or 0 for any",
            ) from error

    async def _report(self) -> None:
        line = StatsLine(self._metrics)
        while self._options.stats_interval_s > 0:
            await asyncio.sleep(self._options.stats_interval_s)
            if self._committer is not None:
                self._committer.update_gauges()
            log.info("stats", extra=fields(**line.fields()))
            if self._committer is not None:
                self._committer.writes.report()
            if self._options.exposed:
                log.warning("listening without TLS and tokens, as configured")


def run(options: PersistdOptions, announce: Callable[[Bound], None]) -> None:
    """Run the daemon until SIGTERM or SIGINT."""

    async def main() -> None:
        daemon = Persistd(options)
        at_stop_signals(daemon.stop)
        await daemon.run(announce)

    asyncio.run(main())


async def check(options: PersistdOptions) -> tuple[str, bytes]:
    """Open the backend once; return its masked URL and its incarnation, or raise."""
    backend = await open_backend(options.consensus, options.pool)
    try:
        return backend.url, backend.incarnation
    finally:
        await backend.close()
