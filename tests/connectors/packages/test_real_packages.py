"""Packages of others, where they are installed: `penstock connector install` makes these tests run.

airbyte:source-faker, airbyte:source-declarative-manifest, airbyte:source-file,
singer:pipelinewise-tap-postgres and singer:tap-rest-api-msdk.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest

from connectors.packages.fakes import Run, binding, opening
from penstock.connectors.packages.airbyte import Airbyte
from penstock.connectors.packages.environments import find, parse
from penstock.connectors.packages.singer import Singer
from penstock.errors import PenstockError
from penstock.model.schema import compiled
from penstock.native.take import Taker
from penstock.runtime.connector.capture import Discovered
from penstock.testing.postgres import PostgresServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Config = dict[str, Any]


def installed(image: str) -> str:
    """The package of an image; skips the test where it is not installed."""
    try:
        find(parse(image), where="here")
    except PenstockError as missing:
        pytest.skip(str(missing.fix))
    return image.partition(":")[2]


def airbyte(image: str, config: Config, **others: object) -> Airbyte:
    package = installed(image)
    return Airbyte({"config": config, **others}, where="capture acme/x", package=package)


def singer(image: str, config: Config) -> Singer:
    return Singer({"config": config}, where="capture acme/x", package=installed(image))


def fits(found: Discovered, run: Run, at: int = 0) -> None:
    """What a run gives fits the schema that was discovered."""
    taker = Taker(compiled(json.dumps(found.schema)))
    for sequence in run.sequences:
        for given in sequence.given:
            if given.binding == at:
                taken = taker.take_texts(given.documents.texts or (), given.documents.meta)
                assert taken.refused == ()


# --------------------------------------------------------------------------- pages of an HTTP API


@pytest.fixture
def api() -> Iterator[tuple[str, Callable[[int], None]]]:
    """The URL of a server with rows, ten on a page; and how to have more of them."""
    rows = 25

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            page = int(query.get("page", ["1"])[0])
            ids = range(rows)[(page - 1) * 10 : page * 10]
            found = [{"id": n, "name": f"n{n}", "updated": f"2024-01-{n % 28 + 1:02}"} for n in ids]
            more = {"next_page": page + 1} if page * 10 < rows else {}
            body = json.dumps({"data": found, **more}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing."""

    def grow(count: int) -> None:
        nonlocal rows
        rows = count

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", grow
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


MANIFEST = """
version: "6.0.0"
type: DeclarativeSource
check: {type: CheckStream, stream_names: [people]}
streams:
  - type: DeclarativeStream
    name: people
    primary_key: [id]
    schema_loader:
      type: InlineSchemaLoader
      schema:
        type: object
        properties:
          id: {type: integer}
          name: {type: [string, "null"]}
          updated: {type: [string, "null"]}
    retriever:
      type: SimpleRetriever
      requester:
        type: HttpRequester
        url_base: "{{ config['url'] }}"
        path: /people
        http_method: GET
      record_selector:
        type: RecordSelector
        extractor: {type: DpathExtractor, field_path: [data]}
      paginator:
        type: DefaultPaginator
        page_token_option: {type: RequestOption, inject_into: request_parameter, field_name: page}
        pagination_strategy:
          type: PageIncrement
          page_size: 10
          start_from_page: 1
          inject_on_first_request: true
spec:
  type: Spec
  connection_specification:
    type: object
    properties: {url: {type: string}}
"""


def test_a_manifest_of_airbyte(tmp_path: Path, api: tuple[str, Callable[[int], None]]) -> None:
    url, grow = api
    (tmp_path / "manifest.yaml").write_text(MANIFEST)
    image, manifest = "airbyte:source-declarative-manifest", str(tmp_path / "manifest.yaml")
    source = airbyte(image, {"url": url}, manifest=manifest)
    source.check()
    (people,) = source.discover()
    assert (people.name, people.key) == ("people", ("/id",))
    run = Run(source.open(opening(binding("people")))).to_end()
    assert run.ids() == list(range(25))
    fits(people, run)
    grow(31)
    again = Run(source.open(opening(binding("people"), state=run.state)), run.state).to_end()
    assert again.ids() == list(range(31)), "a stream without a cursor is read in full each time"


def test_the_rest_tap(api: tuple[str, Callable[[int], None]]) -> None:
    url, _ = api
    stream = {
        "name": "people",
        "path": "/people",
        "primary_keys": ["id"],
        "records_path": "$.data[*]",
        "num_inference_records": 10,
    }
    source = singer("singer:tap-rest-api-msdk", {"api_url": url, "streams": [stream]})
    source.check()
    (people,) = source.discover()
    assert (people.name, people.key) == ("people", ("/id",))
    run = Run(source.open(opening(binding("people")))).to_end()
    assert sorted(set(run.ids())) == list(range(25))
    fits(people, run)


# ------------------------------------------------------------------------------------------ faker


@pytest.mark.parametrize("policy", ["stream_complete", "each"])
def test_airbyte_faker(policy: str) -> None:
    source = airbyte(
        "airbyte:source-faker",
        {"count": 50, "seed": 7, "records_per_slice": 20},
        statePolicy=policy,
    )
    source.check()
    found = {each.name: each for each in source.discover()}
    assert {name: each.key for name, each in found.items()} == dict.fromkeys(
        ("products", "users", "purchases"), ("/id",)
    )
    bindings = [binding(name, index=at) for at, name in enumerate(found)]
    run = Run(source.open(opening(*bindings))).to_end()
    for at, (name, each) in enumerate(found.items()):
        ids = run.ids(at)
        assert len(ids) == len(set(ids)) == 50, name
        fits(each, run, at)
    assert set(run.state) == {f"{name}.v0" for name in found}
    again = Run(source.open(opening(*bindings, state=run.state)), run.state).to_end()
    assert set(again.state) == set(run.state)


def test_faker_is_interrupted_in_its_middle() -> None:
    config = {"count": 1_000_000, "seed": 7, "records_per_slice": 1000}
    source = airbyte("airbyte:source-faker", config)
    session = source.open(opening(binding("users")))
    run = Run(session)
    run.poll()
    threading.Timer(0.2, source.interrupt).start()
    with pytest.raises(PenstockError, match="was interrupted"):
        run.to_end()
    assert run.ids()
    assert run.state == {}


# ------------------------------------------------------------------------------------------ files


def test_airbyte_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,name\n" + "".join(f"{n},n{n}\n" for n in range(100)))
    config = {
        "dataset_name": "rows",
        "format": "csv",
        "url": str(path),
        "provider": {"storage": "local"},
    }
    source = airbyte("airbyte:source-file", config)
    source.check()
    (rows,) = source.discover()
    assert rows.key == ("/_meta/source/id",), "it names no key"
    assert rows.note is not None
    schema: Any = rows.schema
    run = Run(source.open(opening(binding("rows", schema=schema)))).to_end()
    assert run.ids() == list(range(100))
    fits(rows, run)


# ------------------------------------------------------------------------------------- PostgreSQL


@pytest.mark.postgres
def test_the_tap_for_postgresql(postgres: PostgresServer) -> None:
    url = postgres.url()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE people (id bigint PRIMARY KEY, name text, at timestamptz)")
        connection.execute(
            "INSERT INTO people SELECT n, 'n' || n, now() FROM generate_series(1, 100) n"
        )
        about = connection.info
        config = {
            "host": about.host,
            "port": about.port,
            "user": about.user,
            "password": about.password or "none",
            "dbname": about.dbname,
        }
        source = singer("singer:pipelinewise-tap-postgres", config)
        source.check()
        people = next(each for each in source.discover() if "people" in each.name)
        assert people.key == ("/id",)
        resource: Any = people.resource
        bound = binding(resource["stream"], replicationMethod="INCREMENTAL", replicationKey="id")
        run = Run(source.open(opening(bound))).to_end()
        assert sorted(set(run.ids())) == list(range(1, 101))
        fits(people, run)
        connection.execute("INSERT INTO people SELECT n, 'new' FROM generate_series(101, 105) n")
        again = Run(source.open(opening(bound, state=run.state)), run.state).to_end()
        assert set(range(101, 106)) <= set(again.ids())
        assert len(again.ids()) < 20, "it goes on from its bookmark"
        raised = binding(
            resource["stream"],
            backfill=1,
            replicationMethod="INCREMENTAL",
            replicationKey="id",
        )
        anew = Run(source.open(opening(raised, state=again.state)), again.state).to_end()
        assert sorted(set(anew.ids())) == list(range(1, 106))
