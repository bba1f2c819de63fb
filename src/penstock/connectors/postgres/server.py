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
from os.path import normpath
from typing import Final

import psycopg

from penstock.connectors.postgres.columns import NAME_BYTES_MAX
from penstock.connectors.postgres.locks import LOCK_S, PostgresConnection, application, blocked
from penstock.connectors.sql.sink import HARD_DELETE
from penstock.errors import Bug, UserError
from penstock.model.config_schema import ConfigSchema
from penstock.model.json_order import Json
from penstock.model.spec import Frozen
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.secrets import resolve
from penstock.servicekit.secrets import conceal, mask

SERIALIZATION: Final = frozenset({"40001", "40P01"})
"""Another transaction was in the way, and this one is undone: it can run again at once."""
LOCKED: Final = "55P03"
"""Another transaction held a lock for longer than this one may wait."""

_ADDRESS: Final = re.compile(
    r"(?P<directory>/[^:]*)(:(?P<socket>\d+))?"
    r"|(\[(?P<ipv6>[0-9a-fA-F:.]+)\]|(?P<host>[^:/@\s]+))(:(?P<port>\d+))?"
)
SCHEMA: Final[dict[str, Json]] = {
    "type": "string",
    "pattern": r"^(?!pg_)[^\u0000]+$",
    "maxLength": NAME_BYTES_MAX,
    "default": "public",
    "title": f"the name of a schema, of at most {NAME_BYTES_MAX} bytes; names that begin with pg_ "
    "are taken",
    "description": "The schema of tables whose resource names none.",
    "examples": ["public"],
}


def _text(title: str, description: str, example: str) -> dict[str, Json]:
    return {
        "type": "string",
        "minLength": 1,
        "title": title,
        "description": description,
        "examples": [example],
    }


CONFIG_SCHEMA: Final = ConfigSchema(
    {
        "address": {
            **_text(
                "a host with a port, or a directory of sockets",
                "The server. The port is 5432 if there is none.",
                "db.example.com:5432",
            ),
            "pattern": r"^(/[^:]*(:\d+)?|(\[[0-9a-fA-F:.]+\]|[^:/@\s]+)(:\d+)?)$",
        },
        "database": _text("the name of a database", "The database.", "sales"),
        "user": _text("the name of a user", "The user to log in as.", "penstock"),
        "password": {
            "type": "string",
            "title": "a text",
            "description": "The password, as a reference to a secret.",
            "examples": ['"${env:PGPASSWORD}"'],
            "secret": True,
        },
        "schema": SCHEMA,
        "sslmode": {
            "enum": ["disable", "allow", "prefer", "require", "verify-ca", "verify-full"],
            "type": "string",
            "default": "prefer",
            "title": "a text",
            "description": "When to use TLS, as PostgreSQL calls it.",
            "examples": ["verify-full"],
        },
        "hardDelete": HARD_DELETE,
    },
    required=("address", "database", "user"),
)

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
        at = f"{where}: endpoint.connector.config"
        given = CONFIG_SCHEMA.read(config, where=at)
        if _ADDRESS.fullmatch(given["address"]) and not 0 < _place(given["address"])[1] < 1 << 16:
            raise UserError(
                "the port of `address` is not between 1 and 65535",
                where=at,
                fix="for example address: db.example.com:5432",
            )
        return cls(config=Frozen(given), where=where)

    @property
    def name(self) -> str:
        """Server and database as the catalog writes them: without secrets."""
        return f"{self.config.value['address']}, database {self.config.value['database']}"

    @property
    def location(self) -> tuple[str, ...]:
        """Server and database; equal if they are certainly the same."""
        address, database = (self._known(name) for name in ("address", "database"))
        if _ADDRESS.fullmatch(address) is None:
            return address, database
        host, port = _place(address)
        host = host.lower().removesuffix(".") if not host.startswith("/") else normpath(host)
        host = "localhost" if host in ("127.0.0.1", "::1") else host
        return host, str(port), database

    def _known(self, name: str) -> str:
        """Return a value, or the reference to one that is known only where the task runs."""
        given = self.config.value[name]
        with contextlib.suppress(UserError):
            return str(resolve(given, where=self._at))
        return str(given)

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

    def connect(
        self,
        *,
        timeout_s: int = _CONNECT_S_MAX,
        options: str | None = None,
        replication: str | None = None,
    ) -> PostgresConnection:
        """Open a connection that begins no transaction by itself; raises `ConnectorError`.

        `options` and `replication` are those of libpq.
        """
        config = CONFIG_SCHEMA.read(resolve(self.config.value, where=self._at), where=self._at)
        host, port = _place(config["address"])
        password = config.get("password")
        if password is not None:
            conceal(password, beside=(config.get("user"), config.get("database"), host))
        try:
            return PostgresConnection.connect(
                host=host,
                port=port,
                dbname=config["database"],
                user=config["user"],
                password=password,
                sslmode=config.get("sslmode", "prefer"),
                application_name=application(self.where),
                client_encoding="utf8",
                connect_timeout=timeout_s,
                keepalives_idle=_SILENT_MS_MAX // 1000,
                tcp_user_timeout=_SILENT_MS_MAX,
                autocommit=True,
                cursor_factory=psycopg.RawCursor,
                prepare_threshold=None,  # a pooler may hand every transaction to another server
                options=options,
                replication=replication,
            )
        except psycopg.Error as error:
            raise self._unreachable(error, password) from None

    def _unreachable(self, error: psycopg.Error, password: str | None) -> ConnectorError:
        """Explain a refused connection: the server gives no code for it, only words."""
        why = mask(" ".join(str(error).split()), password)
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


def _place(address: str) -> tuple[str, int]:
    """Return host, or directory, and port of an address that fits the schema."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise Bug("an address fits the schema, and is none")
    host = found["directory"] or found["ipv6"] or found["host"]
    return host, int(found["port"] or found["socket"] or 5432)


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
    "53100": "free some space on the server; the task then continues by itself",
    "53300": "raise max_connections, or end what else is connected",
    LOCKED: f"{LOCK_S} s were waited; end the transaction that holds the lock (pg_blocking_pids "
    "tells which), or wait: it is tried again",
    "25P03": "nothing: the session slept inside of a transaction, and starts again",
    "57014": "nothing, if the task was stopped; it continues after its last transaction",
    "42P01": "a table was dropped under the task; it is made again when the task starts again",
    "42703": "a column was dropped under the task; it is made again when the task starts again",
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
            "correct the collection"
        )
    return ConnectorError(
        f"PostgreSQL refused: {said.message_primary or type(error).__name__}",
        where=f"{where}{f': {place}' if place else ''}, user {user}",
        why=f"SQLSTATE {code}",
        fix=fix,
        transient=code.startswith(_TRANSIENT),
    )
