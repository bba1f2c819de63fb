"""Every schema change at every endpoint: what `apply` foresees, what a run does, and the rows.

The cases and the table of docs/schema-changes.md are the same: what the document says of a change
is compared with what happens. All cases of an endpoint are the bindings of one task, so that they
cost two runs together.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psycopg
import pytest

from penstock import applying
from penstock.catalog.build import build_valid
from penstock.catalog.desired import ApplyResult, ChangeRefused
from penstock.connectors.builtin import BUILTIN
from runtime.sessions import Document, Place, task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def _schema(*required: str, **properties: Document) -> Document:
    return {
        "type": "object",
        "required": ["id", *required],
        "properties": {"id": {"type": "integer"}, **properties},
    }


@dataclass(frozen=True)
class Change:
    """A change of a collection or of a binding, and the rows that a table has after it."""

    before: Document
    after: Document
    old: Document
    """The document that is stored before; a second one, which is stored after, has all members."""
    new: Document
    rows: Mapping[int, object]
    """Values of `column` by id, as texts; None is NULL."""
    column: str = "v"
    about: str | None = "v"
    """The column that the change is about; None: the rows."""
    collection: tuple[Document, Document] = ({}, {})
    binding: tuple[Document, Document] = ({}, {})
    key: str = "id"


TEXT = {"type": "string"}
LONG = {"type": "integer"}
WIDE = {"type": "integer", "minimum": -(10**30), "maximum": 10**30}
DATE = {"type": "string", "format": "date"}
SUM = {"type": "integer", "reduce": {"strategy": "sum"}}
TAGS = {"type": "array", "items": LONG, "reduce": {"strategy": "append"}}
MERGE = {"reduce": {"strategy": "merge"}}


def _require(*names: str) -> Document:
    return {"fields": {"recommended": True, "require": {name: {} for name in names}}}


CHANGES = {
    "`integer` to `number`": Change(
        _schema(v=LONG), _schema(v={"type": "number"}), {"v": 5}, {"v": 2.5}, {1: 5.0, 2: 2.5}
    ),
    "a wider range of integers, beyond 64 bits": Change(
        _schema(v=LONG), _schema(v=WIDE), {"v": 5}, {"v": 10**29}, {1: 5, 2: 10**29}
    ),
    "longer strings": Change(
        _schema(v={**TEXT, "maxLength": 3}),
        _schema(v={**TEXT, "maxLength": 30}),
        {"v": "abc"},
        {"v": "abcdef"},
        {1: "abc", 2: "abcdef"},
    ),
    "required to optional": Change(
        _schema("v", v=TEXT), _schema(v=TEXT), {"v": "a"}, {}, {1: "a", 2: None}
    ),
    "optional to required": Change(
        _schema(v=TEXT), _schema("v", v=TEXT), {"v": "a"}, {"v": "b"}, {1: "a", 2: "b"}
    ),
    "a new field": Change(_schema(), _schema(v=TEXT), {}, {"v": "b"}, {1: None, 2: "b"}),
    "a removed field": Change(_schema(v=TEXT), _schema(), {"v": "a"}, {}, {1: "a", 2: None}),
    "a field renamed by a projection": Change(
        _schema(v=TEXT),
        _schema(v=TEXT),
        {"v": "a"},
        {"v": "b"},
        {1: "a", 2: "b"},
        column="w",
        about="w",
        collection=({}, {"projections": {"w": "/v"}}),
    ),
    "a projection of another location": Change(
        _schema(v=TEXT, w=TEXT),
        _schema(v=TEXT, w=TEXT),
        {"v": "a", "w": "A"},
        {"v": "b", "w": "B"},
        {1: "A", 2: "B"},
        column="p",
        about="p",
        collection=({"projections": {"p": "/v"}}, {"projections": {"p": "/w"}}),
        binding=(_require("p"), _require("p")),
    ),
    "`string` to `format: date`": Change(
        _schema(v=TEXT),
        _schema(v=DATE),
        {"v": "2020-02-29"},
        {"v": "2021-01-01"},
        {1: "2020-02-29", 2: "2021-01-01"},
    ),
    "`format: date` to `string`": Change(
        _schema(v=DATE), _schema(v=TEXT), {"v": "2020-02-29"}, {"v": "x"}, {1: "2020-02-29", 2: "x"}
    ),
    "one type to several": Change(
        _schema(v=LONG),
        _schema(v={"type": ["integer", "string"]}),
        {"v": 5},
        {"v": "x"},
        {1: "5", 2: '"x"'},
        binding=(_require("v"), _require("v")),
    ),
    "another key of the table (`groupBy`)": Change(
        _schema("v", v=TEXT),
        _schema("v", v=TEXT),
        {"v": "a"},
        {"v": "b"},
        {1: "a", 2: "b"},
        about=None,
        binding=({}, {"fields": {"recommended": True, "groupBy": ["id", "v"]}}),
    ),
    "`delta_updates` switched on": Change(
        _schema(v=TEXT),
        _schema(v=TEXT),
        {"v": "a"},
        {"v": "b"},
        {1: "a", 2: "b"},
        about=None,
        binding=({}, {"delta_updates": True}),
    ),
    "a reduction that needs the stored document": Change(
        _schema(v=SUM) | MERGE,
        _schema(v=SUM, t=TAGS) | MERGE,
        {"v": 5},
        {"v": 7, "t": [1]},
        {1: 5, 2: 7},
        about=None,
    ),
}


def table_of(change: str) -> str:
    return f"c{list(CHANGES).index(change)}"


# -------------------------------------------------------------------------------------- endpoints


@dataclass
class Endpoint:
    """An endpoint, as readers see it."""

    image: str
    config: Document
    query: Callable[[str], list[tuple[Any, ...]]]
    schema: str = ""

    def rows(self, table: str, column: str) -> dict[int, object]:
        found = self.query(f'SELECT id, "{column}" FROM {self.schema}{table}')  # noqa: S608
        assert len(dict(found)) == len(found)
        return dict(found)

    def generation(self, table: str) -> str:
        where = f"WHERE name = '{table}'"
        ((key, rebuild),) = self.query(
            f"SELECT state_key, rebuild FROM {self.schema}penstock_tables {where}"  # noqa: S608
        )
        assert rebuild is None, "its shadow has replaced it"
        return str(key).rpartition(".")[2]


def on_sqlite(directory: Path, request: pytest.FixtureRequest) -> Endpoint:
    path = directory / "views.db"

    def query(text: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            return connection.execute(text).fetchall()

    return Endpoint("sqlite", {"path": str(path)}, query)


def on_postgres(directory: Path, request: pytest.FixtureRequest) -> Endpoint:
    url = request.getfixturevalue("postgres").create_database()
    parts = urlsplit(url)
    (directory / "password").write_text(parts.password or "none")
    schema = f"evo_{secrets.token_hex(4)}"

    def query(text: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(url) as connection:
            return connection.execute(text.encode()).fetchall()

    config = {
        "address": f"{parts.hostname}:{parts.port}",
        "database": parts.path.lstrip("/"),
        "user": parts.username or "postgres",
        "password": f"${{file:{directory}/password}}",
        "schema": schema,
    }
    return Endpoint("postgres", config, query, f"{schema}.")


ENDPOINTS = {"SQLite": on_sqlite, "PostgreSQL": on_postgres}


@dataclass
class Trial:
    """A deployment with one collection and one table for each change."""

    place: Place
    endpoint: Endpoint
    foreseen: ApplyResult | None = None
    counts: dict[str, int] = field(default_factory=dict)
    """The least number of rows that a reader has seen in a table while it was rebuilt."""

    def apply(
        self, after: bool | frozenset[str], *, dry_run: bool = False, **more: object
    ) -> ApplyResult:
        """Apply all changes, or some; `more` are members of every binding."""
        collections, bindings = {}, []
        for name, change in CHANGES.items():
            is_after = name in after if isinstance(after, frozenset) else after
            collections[f"acme/{table_of(name)}"] = {
                "key": ["/id"],
                "schema": change.after if is_after else change.before,
                **change.collection[is_after],
            }
            given = dict(change.binding[is_after])
            delta = {"delta_updates": True} if given.pop("delta_updates", False) else {}
            bindings.append(
                {
                    "source": f"acme/{table_of(name)}",
                    "resource": {"table": table_of(name), **delta},
                    **given,
                    **more,
                }
            )
        tasks = {"acme/views": task(self.endpoint.image, self.endpoint.config, bindings)}
        return self.applied(collections, tasks, dry_run=dry_run)

    def applied(
        self, collections: Document, tasks: Document, *, dry_run: bool = False
    ) -> ApplyResult:
        file = self.place.directory / "catalog.json"
        file.write_text(json.dumps({"collections": collections, "materializations": tasks}))
        built = build_valid([file], environ=None, connectors=BUILTIN, inferred={})

        async def apply() -> ApplyResult:
            async with self.place.store() as store:
                return await applying.apply(store, built, dry_run=dry_run)

        return asyncio.run(apply())

    def append(self, number: int) -> None:
        self.place.append(
            {
                f"acme/{table_of(name)}": [
                    {"id": number, **(change.new if number > 1 else change.old)}
                ]
                for name, change in CHANGES.items()
            }
        )

    def run(self) -> None:
        error = self.place.run()["acme/views"].error
        if error is not None:
            raise error

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within this, a reader looks at all tables over and over."""
        ended = threading.Event()

        def look() -> None:
            while not ended.is_set():
                for name in CHANGES:
                    table = table_of(name)
                    ((count,),) = self.endpoint.query(
                        f"SELECT count(*) FROM {self.endpoint.schema}{table}"  # noqa: S608
                    )
                    self.counts[table] = min(count, self.counts.get(table, count))

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@pytest.fixture(
    scope="module",
    params=["SQLite", pytest.param("PostgreSQL", marks=pytest.mark.postgres)],
)
def trial(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> Trial:
    """All changes are made between two runs."""
    directory = tmp_path_factory.mktemp("changes")
    made = Trial(Place(directory, spark), ENDPOINTS[request.param](directory, request))
    made.apply(after=False)
    made.append(1)
    made.run()
    made.foreseen = made.apply(after=True)
    made.append(2)
    with made.watched():
        made.run()
    return made


def documented() -> dict[str, dict[str, str]]:
    """The table of the document: by change and endpoint."""
    text = (ROOT / "docs" / "schema-changes.md").read_text()
    table = text[text.index("| change |") :].partition("\n\n")[0]
    head, _, *rows = [
        [cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()
    ]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def endpoint_name(trial: Trial) -> str:
    return {"sqlite": "SQLite", "postgres": "PostgreSQL"}[trial.endpoint.image]


def test_the_document_has_every_change() -> None:
    assert [*documented()] == [*CHANGES, *REFUSED]


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_does_what_the_document_says(trial: Trial, name: str) -> None:
    change, table = CHANGES[name], table_of(name)
    assert trial.foreseen is not None
    effects = [
        f"{each.how}: {each.says}"
        for each in trial.foreseen.tables
        if each.table.rpartition(".")[2] == table and each.column == change.about
    ]
    said = "; ".join(effects) or "nothing to do"
    assert documented()[name][endpoint_name(trial)] == said
    found = trial.endpoint.rows(table, change.column)
    shown = {key: value if value is None else _text(value) for key, value in found.items()}
    assert shown == {key: None if v is None else _text(v) for key, v in change.rows.items()}
    rebuilt = any(
        each.how == "rebuild" and each.table.rpartition(".")[2] == table
        for each in trial.foreseen.tables
    )
    assert trial.endpoint.generation(table) == ("v1" if rebuilt else "v0"), "as it was foreseen"
    assert trial.counts.get(table, 1) >= 1, "nobody has seen it empty"


def _text(value: object) -> str:
    if isinstance(value, str) and value.lstrip("-").isdecimal():
        return str(int(value))
    if isinstance(value, int | float) or type(value).__name__ == "Decimal":
        return str(int(value)) if value == int(value) else str(value)  # type: ignore[call-overload]
    return str(value) if not isinstance(value, str) else value.strip('"')


# ---------------------------------------------------------------------------------------- refused

REFUSED = {
    "`integer` to `string`": ({"schema": _schema(v=TEXT)}, "E-TYPE-CHANGE"),
    "fewer integers than were allowed": ({"schema": _schema(w=LONG, v=LONG)}, "E-NARROWED"),
    "another key of the collection": (
        {"key": ["/id", "/v"], "schema": _schema("v", v=LONG)},
        "E-KEY-CHANGE",
    ),
    "another partition": (
        {
            "schema": _schema("v", v=LONG),
            "projections": {"v": {"location": "/v", "partition": True}},
        },
        "E-PARTITION-CHANGE",
    ),
}
"""Changes under which stored documents could not be read, wherever they are materialized."""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Trial:
    directory = tmp_path_factory.mktemp("refused")
    made = Trial(Place(directory, spark), on_sqlite(directory, None))  # type: ignore[arg-type]
    made.applied({"acme/c": {"key": ["/id"], "schema": _schema(v=LONG, w=WIDE)}}, {})
    made.place.append({"acme/c": [{"id": 1, "v": 5, "w": 6}]})
    return made


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_that_documents_do_not_allow_is_refused(stored: Trial, name: str) -> None:
    changed, code = REFUSED[name]
    with pytest.raises(ChangeRefused) as refused:
        stored.applied({"acme/c": {"key": ["/id"], **changed}}, {})
    assert code in str(refused.value)
    for said in documented()[name].values():
        assert said == f"refused: {code}"
