"""A PostgreSQL server as a catalog describes it, and its errors in words that help.

A `Server` holds references in place of secrets. They are resolved when a connection is opened, and
live no longer than that: a `Server` can be pickled, printed and sent to Spark tasks. Errors name
the server as the catalog does.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import psycopg

from penstock.connectors.config import check_members, read_text
from penstock.connectors.postgres.locks import LOCK_S, PostgresConnection, application, blocked
from penstock.errors import UserError
from penstock.model.json_order import Json
from penstock.model.spec import Frozen
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.secrets import resolve
from penstock.servicekit.secrets import conceal, mask

SERIALIZATION: Final = frozenset({"40001", "40P01"})
"""Another transaction was in the way, and this one is undone: it can run again at once."""
LOCKED: Final = "55P03"
"""Another transaction held a lock for longer than this one may wait."""

_MEMBERS: Final = ("address", "database", "user", "password", "schema", "sslmode", "hardDelete")
_EXAMPLE: Final = (
    "{address: db.example.com:5432, database: sales, user: penstock, password: "
    '"${env:PGPASSWORD}", schema: public}'
)
_ADDRESS: Final = re.compile(
    r"(?P<directory>/[^:]*)(:(?P<socket>\d+))?"
    r"|(\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<host>[^:/@\s]+))(:(?P<port>\d+))?"
)
_SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")

_CONNECT_S_MAX: Final = 10
_LOOK_S_MAX: Final = 2
_SILENT_MS_MAX: Final = 60_000
"""Time that data may stay unacknowledged before a connection counts as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A database on a server, and its user."""

    config: Frozen = field(repr=False)
    where: str
    """The task that the endpoint belongs to, for errors."""

    @classmethod
    def of(cls, config: Json, where: str) -> Server:
        """Read an endpoint's configuration, and check what can be checked without its secrets."""
        given = check_members(
            config,
            _MEMBERS,
            required=("address", "database", "user"),
            where=f"{where}: endpoint.connector.config",
            example=_EXAMPLE,
        )
        server = cls(config=Frozen(given), where=where)
        if "password" in given:
            read_text(given, "password", where=server._at)
        mode = given.get("sslmode", "prefer")
        if mode not in _SSL_MODES:
            raise UserError(
                "sslmode is none that PostgreSQL has",
                where=server._at,
                fix=f"one of {', '.join(_SSL_MODES)}",
            )
        return server

    @property
    def name(self) -> str:
        """Server and database as the catalog writes them: without secrets."""
        return f"{self.config.value['address']}, database {self.config.value['database']}"

    @property
    def location(self) -> tuple[str, ...]:
        """Server and database; equal if they are certainly the same."""
        address, database = str(self.config.value["address"]), str(self.config.value["database"])
        try:
            host, port = self._place(address)
        except UserError:
            return address, database  # a reference: its value is known where the task runs
        host = "localhost" if host in ("127.0.0.1", "::1") else host.lower()
        return host, str(port), database

    @property
    def user(self) -> str:
        """The user as the catalog writes it."""
        name: str = self.config.value["user"]
        return name

    @property
    def _at(self) -> str:
        return f"{self.where}: endpoint.connector.config"

    def blocked(self) -> str | None:
        """Return the lock that a session of this task waits for, and its holder."""
        with contextlib.closing(self.connect(timeout_s=_LOOK_S_MAX)) as connection:
            return blocked(connection, application(self.where))

    def connect(self, *, timeout_s: int = _CONNECT_S_MAX) -> PostgresConnection:
        """Open a connection that begins no transaction by itself; raises `ConnectorError`."""
        config = resolve(self.config.value, where=self._at)
        if not isinstance(config, dict):
            raise UserError("an object is expected", where=self._at, fix=_EXAMPLE)
        host, port = self._place(read_text(config, "address", where=self._at))
        password = config.get("password")
        if isinstance(password, str):
            conceal(password, beside=(config.get("user"), config.get("database"), host))
        try:
            return PostgresConnection.connect(
                host=host,
                port=port,
                dbname=read_text(config, "database", where=self._at),
                user=read_text(config, "user", where=self._at),
                password=password if isinstance(password, str) else None,
                sslmode=read_text(config, "sslmode", where=self._at, default="prefer"),
                application_name=application(self.where),
                client_encoding="utf8",
                connect_timeout=timeout_s,
                keepalives_idle=_SILENT_MS_MAX // 1000,
                tcp_user_timeout=_SILENT_MS_MAX,
                autocommit=True,
                cursor_factory=psycopg.RawCursor,
                prepare_threshold=None,  # a pooler may hand every transaction to another server
            )
        except psycopg.Error as error:
            raise self._unreachable(error, password) from None

    def _place(self, address: str) -> tuple[str, int]:
        found = _ADDRESS.fullmatch(address)
        if found is None:
            raise UserError(
                "address is neither a host with a port nor a directory of sockets",
                where=self._at,
                fix="address: db.example.com:5432, or address: /var/run/postgresql",
            )
        host = found["directory"] or found["ipv6"] or found["host"]
        return host, int(found["port"] or found["socket"] or 5432)

    def _unreachable(self, error: psycopg.Error, password: Json) -> ConnectorError:
        """Explain a refused connection: the server gives no code for it, only words."""
        known = password if isinstance(password, str) else None
        why = mask(" ".join(str(error).split()), known)
        _, what, fix, transient = next(
            (refusal for refusal in _REFUSALS if re.search(refusal[0], why)), _UNREACHABLE
        )
        return ConnectorError(
            what.format(user=self.user), where=self.name, why=why, fix=fix, transient=transient
        )

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Within this, errors of the server are `ConnectorError`."""
        try:
            yield
        except psycopg.Error as error:
            raise explain(error, where=self.name, user=self.user) from error


_Refusal = tuple[str, str, str, bool]
_UNREACHABLE: Final[_Refusal] = ("", "PostgreSQL cannot be reached", "is it running?", True)
_REFUSALS: Final[tuple[_Refusal, ...]] = (
    (
        "password|authentication|[Rr]ole .* does not exist|not permitted to log in",
        "PostgreSQL does not let {user} in",
        "check user and password; a password reference is read where the task runs",
        False,
    ),
    ("pg_hba.conf", "PostgreSQL does not let {user} in from here", "add it to pg_hba.conf", False),
    (
        "[Dd]atabase .* does not exist",
        "there is no such database",
        "create it, or correct `database`",
        False,
    ),
    (
        "permission denied for database",
        "{user} may not connect to the database",
        "GRANT CONNECT ON DATABASE … TO the user",
        False,
    ),
    (
        "[Cc]onnection refused|No such file or directory",
        "PostgreSQL does not listen there",
        "start it, or correct `address`",
        True,
    ),
    (
        "resolve host|translate host name",
        "the host of `address` is not known",
        "check its spelling, and the name server",
        True,
    ),
    ("SSL|certificate", "PostgreSQL and sslmode do not agree", "change sslmode", False),
    ("too many|remaining connection slots", "PostgreSQL is full", "raise max_connections", True),
    ("starting up|shutting down|recovery", "PostgreSQL is not ready yet", "wait", True),
)
"""Pattern of the server's words, their meaning, the fix, and whether waiting helps."""

_HINTS: Final = {
    "42501": "GRANT what is missing to the user of the endpoint",
    "25006": "the server is read-only, a standby perhaps: give the address of the primary",
    "22003": "a sum has outgrown its column: make it a `number`, or start over by `backfill`",
    "54000": "a key must be short enough for PostgreSQL's index: 2,700 bytes; exclude the field "
    "from `groupBy`, or shorten it",
    "53100": "free some space on the server; the task goes on by itself then",
    "53300": "raise max_connections, or end what else is connected",
    LOCKED: f"{LOCK_S} s were waited; end the transaction that holds the lock (pg_blocking_pids "
    "tells which), or wait: it is tried again",
    "25P03": "nothing: the session slept inside of a transaction, and starts anew",
    "57014": "nothing, if the task was stopped; it goes on from its last transaction",
    "42P01": "a table was dropped under the task; it is made again when the task starts anew",
    "42703": "a column was dropped under the task; it is made again when the task starts anew",
}
_TRANSIENT: Final = ("08", "40", "53", "55", "57", "58", "25006", "25P03", "42P01", "42703")


def explain(error: psycopg.Error, *, where: str, user: str) -> ConnectorError:
    """Explain an error of the server, and what to do about it. Values of rows stay out."""
    code = error.sqlstate
    if code is None:
        return ConnectorError(
            "the connection to PostgreSQL is lost",
            where=where,
            why=mask(" ".join(str(error).split())),
            fix="nothing, if the server comes back",
            transient=True,
        )
    said = error.diag
    place = ".".join(filter(None, (said.schema_name, said.table_name, said.column_name)))
    fix = _HINTS.get(code)
    if code.startswith("23"):
        fix = (
            f"rows of the collection break {said.constraint_name or 'a constraint'}: drop it, or "
            "mend the collection"
        )
    return ConnectorError(
        f"PostgreSQL refused: {said.message_primary or type(error).__name__}",
        where=f"{where}{f': {place}' if place else ''}, user {user}",
        why=f"SQLSTATE {code}",
        fix=fix,
        transient=code.startswith(_TRANSIENT),
    )
