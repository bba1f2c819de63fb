"""Real endpoints for the suite: a database each, and a way to look into it as its users do."""

from __future__ import annotations

import sqlite3
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from penstock.connectors.postgres.sink import Postgres
from penstock.connectors.sqlite.sink import Sqlite
from penstock.model.spec import Endpoint
from penstock.testing.sink_harness import SqlPlace

SECRET = "hunter2-of-the-test"  # noqa: S105 - of a server that lives as long as the test
VARIABLE = "PENSTOCK_TEST_PASSWORD"


@dataclass
class SqlitePlace(SqlPlace):
    table_options = " STRICT"

    def __post_init__(self) -> None:
        self.config = {"path": str(self.directory / "views.db")}

    def connect(self, endpoint: Endpoint, where: str) -> Sqlite:
        return Sqlite(endpoint.config.value, where=where)

    def rows(self, table: str = "t") -> list[dict[str, Any]]:
        with sqlite3.connect(self.config["path"]) as connection:
            cursor = connection.execute(f'SELECT * FROM "{table}"')  # noqa: S608
            names = [column[0] for column in cursor.description]
            found = [dict(zip(names, row, strict=True)) for row in cursor]
        connection.close()
        return found

    def execute(self, statement: str) -> list[Any]:
        with sqlite3.connect(self.config["path"], timeout=30) as connection:
            found = connection.execute(statement).fetchall()
        connection.close()
        return found

    def columns(self, table: str = "t") -> dict[str, str]:
        return dict(self.execute(f"SELECT name, type FROM pragma_table_info('{table}')"))  # noqa: S608

    def snapshot(self) -> Any:  # noqa: ANN401
        if not Path(self.config["path"]).exists():
            return None
        tables = self.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'table'")
        return [(name, text, self.rows(name)) for name, text in tables]

    def previews(self) -> list[str]:
        return sorted(path.name for path in self.directory.glob("*preview*"))


@dataclass
class PostgresPlace(SqlPlace):
    """A schema, and a role that may do no more than it must: a database for each test is dear."""

    admin_url: str
    role: str = field(init=False)
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.secrets = (SECRET,)
        given = conninfo_to_dict(self.admin_url)
        self.role = f"worker_{uuid.uuid4().hex[:12]}"
        host, port, database = given["host"], given["port"], given["dbname"]
        with psycopg.connect(self.admin_url, autocommit=True) as connection:
            for statement in (
                f"CREATE ROLE {self.role} LOGIN PASSWORD '{SECRET}'",
                f"CREATE SCHEMA {self.role} AUTHORIZATION {self.role}",
                f"ALTER ROLE {self.role} SET search_path = {self.role}",
                "CREATE SCHEMA IF NOT EXISTS penstock_stage",
                f"GRANT CREATE, USAGE ON SCHEMA penstock_stage TO {self.role}",
            ):
                connection.execute(statement.encode())
        self.url = f"postgresql://{self.role}:{SECRET}@{host}:{port}/{database}"
        self.config = {
            "address": f"{host}:{port}",
            "database": database,
            "schema": self.role,
            "user": self.role,
            "password": f"${{env:{VARIABLE}}}",
        }

    def connect(self, endpoint: Endpoint, where: str) -> Postgres:
        return Postgres(endpoint.config.value, where=where)

    def rows(self, table: str = "t") -> list[dict[str, Any]]:
        with psycopg.connect(self.url, row_factory=psycopg.rows.dict_row) as connection:
            query = f'SELECT * FROM "{table}"'  # noqa: S608
            return connection.execute(query.encode()).fetchall()

    def execute(self, statement: str) -> list[Any]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def columns(self, table: str = "t") -> dict[str, str]:
        found = self.execute(
            "SELECT attname::text, format_type(atttypid, atttypmod) FROM pg_attribute "  # noqa: S608
            f"WHERE attrelid = '\"{table}\"'::regclass AND attnum > 0 AND NOT attisdropped"
        )
        return dict(found)

    def snapshot(self) -> Any:  # noqa: ANN401
        tables = self.execute(
            "SELECT tablename::text FROM pg_tables WHERE schemaname = current_schema() ORDER BY 1"
        )
        return [(name, self.rows(name)) for (name,) in tables]

    def previews(self) -> list[str]:
        return [
            name
            for (name,) in self.execute(
                "SELECT tablename::text FROM pg_tables WHERE schemaname = 'penstock_stage' "
                "AND tableowner = current_user ORDER BY 1"
            )
        ]
