"""A real PostgreSQL server on a free loopback port, one per test process, and a database per test.

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
import pytest
from psycopg import sql


def find_binaries() -> Path:
    """The directory of `initdb` and `postgres`: on the path, or where Debian puts them."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: p.parts[-3])
    if not versions:
        pytest.fail("PostgreSQL is not installed; on Debian: apt-get install postgresql")
    return versions[-1].parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclasses.dataclass
class PostgresServer:
    """A server that tests may stop, kill and start again."""

    directory: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://penstock:penstock@127.0.0.1:{self.port}/{database}"

    def initialise(self) -> None:
        password = self.directory / "password"
        password.write_text("penstock")
        self._own(self.directory)
        command = [
            find_binaries() / "initdb", "-D", self.directory / "data", "-U", "penstock", "-A",
            "scram-sha-256", f"--pwfile={password}", "-E", "UTF8", "--no-sync",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, **self._account())

    def start(self) -> None:
        command = [
            find_binaries() / "postgres", "-D", self.directory / "data", "-p", str(self.port),
            "-h", "127.0.0.1", "-k", self.directory, "-c", "max_connections=200",
        ]  # fmt: skip
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, **self._account()
            )
        deadline = time.monotonic() + 60
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

    def _account(self) -> dict[str, str]:
        return {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}

    def _own(self, path: Path) -> None:
        if os.geteuid() == 0:
            account = pwd.getpwnam("postgres")
            for entry in [path, *path.rglob("*")]:
                os.chown(entry, account.pw_uid, account.pw_gid)


@contextlib.contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    # Not below pytest's own directories: those are private to root.
    with tempfile.TemporaryDirectory(prefix="penstock-pg-", ignore_cleanup_errors=True) as directory:
        server = PostgresServer(Path(directory), free_port())
        server.initialise()
        server.start()
        try:
            yield server
        finally:
            server.kill()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The process's shared server; do not stop it, see `own_postgres`."""
    with running_postgres() as server:
        yield server


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A server of the test's own, to kill at will."""
    with running_postgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """A fresh database on the shared server."""
    return postgres.create_database()
