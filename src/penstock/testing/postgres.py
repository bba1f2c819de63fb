"""A real PostgreSQL server on a free loopback port, to start, stop, kill and start again.

Tests and benchmarks share it: both want the real thing, durable (`fsync` stays on) and their own.
PostgreSQL refuses to run as root, so as root the server runs under the `postgres` account that
its Debian package creates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
from psycopg import sql

from penstock.errors import Unavailable

_START_S_MAX = 60


def find_binaries() -> Path:
    """Return the directory of `initdb` and `postgres`: on the path, or where Debian puts them."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: p.parts[-3])
    if not versions:
        raise Unavailable(
            "PostgreSQL is not installed", fix="on Debian: apt-get install postgresql"
        )
    return versions[-1].parent


def free_port() -> int:
    """Return a loopback port that is free at this moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclasses.dataclass
class PostgresServer:
    """A server that its user may stop, kill and start again."""

    directory: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://penstock:penstock@127.0.0.1:{self.port}/{database}"

    def initialise(self) -> None:
        password = self.directory / "password"
        password.write_text("penstock")
        self._own(self.directory)
        command: list[str | Path] = [
            find_binaries() / "initdb", "-D", self.directory / "data", "-U", "penstock", "-A",
            "scram-sha-256", f"--pwfile={password}", "-E", "UTF8", "--no-sync",
        ]  # fmt: skip
        account = _account()
        subprocess.run(  # noqa: S603
            command, check=True, capture_output=True, user=account, group=account
        )

    def start(self) -> None:
        command: list[str | Path] = [
            find_binaries() / "postgres", "-D", self.directory / "data", "-p", str(self.port),
            "-h", "127.0.0.1", "-k", self.directory, "-c", "max_connections=200",
        ]  # fmt: skip
        account = _account()
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(  # noqa: S603
                command, stdout=log, stderr=log, start_new_session=True, user=account, group=account
            )
        deadline = time.monotonic() + _START_S_MAX
        while True:
            try:
                psycopg.connect(self.url(), connect_timeout=5).close()
            except psycopg.OperationalError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        """Fast shutdown: sessions are ended, what was committed is flushed."""
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(timeout=60)
            self.process = None

    def kill(self) -> None:
        """kill -9 of the server and its backends, as a crash of the machine's database."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=60)
            self.process = None
            (self.directory / "data" / "postmaster.pid").unlink(missing_ok=True)

    def create_database(self) -> str:
        """A fresh, empty database; returns its URL."""
        name = f"t{uuid.uuid4().hex}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.url(name)

    def _own(self, path: Path) -> None:
        if os.geteuid() == 0:
            account = pwd.getpwnam("postgres")
            for entry in [path, *path.rglob("*")]:
                os.chown(entry, account.pw_uid, account.pw_gid)


@contextlib.contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """A fresh server that lives as long as the block, and leaves nothing behind."""
    # Not below a directory that is private to root: the server may run under another account.
    with tempfile.TemporaryDirectory(prefix="penstock-pg-", ignore_cleanup_errors=True) as name:
        server = PostgresServer(Path(name), free_port())
        server.initialise()
        server.start()
        try:
            yield server
        finally:
            server.kill()


def _account() -> str | None:
    return "postgres" if os.geteuid() == 0 else None
