"""`penstock shuffle`, as people run it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from typer.testing import CliRunner, Result

from cli.documents import jsonl
from consensus.committer.hostile import connecting, peak_mib
from journal.publishing import ORDERS, batch, world
from penstock import wall_clock
from penstock.cli import shuffle as command
from penstock.cli.main import app
from penstock.journal.planning import Planner
from penstock.journal.publisher import PublisherOptions
from penstock.journal.transaction import BatchLimits, close
from penstock.model.keys import key_hash, pack
from penstock.model.routing import shard_of
from penstock.shuffle import wire
from penstock.shuffle.binding import ad_hoc_bindings
from penstock.shuffle.session import Session
from servicekit.rpc.certificates import certificate

CATALOG = """
collections:
  acme/orders:
    key: [/id]
    schema: &order
      type: object
      required: [id, region]
      properties: {id: {type: integer}, region: {type: string}}
    projections: &by_region
      region: {location: /region, partition: true}
  acme/returns:
    key: [/id]
    schema: *order
  acme/empty:
    key: [/id]
    schema: *order
  acme/copied:
    key: [/id]
    schema: *order
    derive:
      using: {sqlite: {}}
      transforms:
        - {name: fromOrders, source: acme/orders, lambda: "select $id, $region;"}
      shards: {count: 2}
materializations:
  acme/views:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: views.db}}}
    bindings:
      - {source: acme/returns, resource: {table: returns}}
      - {source: acme/empty, resource: {table: empty}, disable: true}
      - {source: acme/orders, resource: {table: orders}, priority: 1}
    shards: {count: 3}
  acme/idle:
    endpoint: {connector: {image: penstock/materialize-sqlite, config: {path: views.db}}}
    bindings: [{source: acme/orders, resource: {table: orders}, disable: true}]
"""


def penstock(*arguments: str, data: Path, stdin: bytes = b"") -> Result:
    return CliRunner().invoke(app, [*arguments, "--data", str(data)], input=stdin)


@contextmanager
def start(*arguments: str, data: Path, environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, which ends with the block, also with one that fails."""
    with subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", "shuffle", *arguments, "--data", str(data)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def append(data: Path, collection: str, *ids: int) -> None:
    documents = [{"id": i, "region": ("eu", "us")[i % 2]} for i in ids]
    done = penstock("append", collection, data=data, stdin=jsonl(documents))
    assert done.exit_code == 0, done.stderr


def filled(directory: Path) -> Path:
    """A data directory with a catalog, and 40 orders and two returns."""
    catalog, data = directory / "catalog.yaml", directory / "data"
    catalog.write_text(CATALOG)
    done = penstock("apply", str(catalog), data=data)
    assert done.exit_code == 0, done.stderr
    append(data, "acme/returns", 1, 2)
    append(data, "acme/orders", *range(30))
    append(data, "acme/orders", *range(30, 40))
    return data


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("shuffle"))


def objects(done: Result) -> list[Any]:
    assert done.exit_code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_checkpoints_are_lines_that_people_read(data: Path) -> None:
    done = penstock("shuffle", "--name", "acme/views", data=data)
    assert done.exit_code == 0, done.stderr
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z"
    first, second = done.stdout.splitlines()
    assert re.fullmatch(
        r"#1  resolved  40 documents  [\d.]+ (K?i?B)  2 journals  2 producers  committed " + time,
        first,
    )
    assert re.fullmatch(
        r"#2  resolved  2 documents  \d+ B  1 journal  1 producer  committed " + time, second
    )
    announced, *_, summary = done.stderr.splitlines()
    assert announced == "acme/views reads acme/returns, acme/orders for 3 shards"
    assert re.fullmatch(r"2 checkpoints, 42 documents, [\d.]+ K?i?B", summary)


def test_checkpoints_are_objects_for_machines(data: Path) -> None:
    orders, returns = objects(penstock("shuffle", "--name", "acme/views", "--json", data=data))
    assert [orders["number"], returns["number"]] == [1, 2]
    assert orders["bindings"] == {"returns.v0": 0, "orders.v0": 40}, "the higher priority first"
    assert returns["bindings"] == {"returns.v0": 2, "orders.v0": 0}
    assert (orders["documents"], orders["journals"], orders["producers"]) == (40, 2, 2)
    assert (orders["peek"], orders["unresolved_hints"]) == (False, 0)
    assert orders["bytes"] > 0
    assert returns["committed_at"] < orders["committed_at"], "its priority is lower, not its age"
    assert "shards" not in orders, "nothing was read"


@pytest.mark.parametrize(
    ("arguments", "bindings", "shards"),
    [
        pytest.param(["acme/orders"], {"ad-hoc": 40}, "1 shard", id="a collection"),
        pytest.param(["acme/copied"], {"fromOrders.v0": 40}, "2 shards", id="a derivation"),
        pytest.param(
            ["acme/orders", "--shards", "5"], {"ad-hoc": 40}, "5 shards", id="more shards"
        ),
    ],
)
def test_whatever_reads_can_be_named(
    data: Path, arguments: list[str], bindings: dict[str, int], shards: str
) -> None:
    done = penstock("shuffle", "--json", "--name", *arguments, data=data)
    (only,) = objects(done)
    assert only["bindings"] == bindings
    assert f"reads acme/orders for {shards}\n" in done.stderr


def test_the_documents_of_a_derived_collection_are_read_ad_hoc(data: Path) -> None:
    done = penstock("shuffle", "--name", "acme/copied", "--ad-hoc", data=data)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "acme/copied reads acme/copied" in done.stderr
    assert done.stderr.endswith("0 checkpoints, 0 documents, 0 B\n")


def test_it_ends_after_as_many_checkpoints_as_one_likes(data: Path) -> None:
    (only,) = objects(
        penstock("shuffle", "--name", "acme/views", "--limit", "1", "--json", data=data)
    )
    assert only["documents"] == 40


def test_the_task_itself_is_left_alone(data: Path) -> None:
    again = [penstock("shuffle", "--name", "acme/views", "--json", data=data) for _ in range(2)]
    assert objects(again[0]) == objects(again[1])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("acme/empty", "0 checkpoints, 0 documents, 0 B", id="nothing was written"),
        pytest.param("acme/idle", "acme/idle reads nothing", id="all is disabled"),
    ],
)
def test_where_there_is_nothing_to_read_it_ends(data: Path, name: str, said: str) -> None:
    done = penstock("shuffle", "--name", name, data=data)
    assert (done.exit_code, done.stdout) == (0, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param(["--name", "acme/veiws"], 1, "fix   did you mean acme/views", id="unknown"),
        pytest.param(["--name", "acme/vi", "--ad-hoc"], 1, "no collection acme/vi", id="ad hoc"),
        pytest.param([], 2, "--name", id="no name"),
        pytest.param(["--name", "acme/views", "--shards", "0"], 2, "--shards", id="no shards"),
        pytest.param(["--name", "acme/views", "--shards", "70000"], 1, "70000", id="many shards"),
        pytest.param(
            ["--listen", "127.0.0.1:0", "--name", "acme/views", "--follow"],
            2,
            "--listen does not go together with --name and --follow",
            id="served, and read here",
        ),
        pytest.param(
            ["--listen", "127.0.0.1:0", "--from", "grpc://h:1"],
            2,
            "--listen does not go together with --from",
            id="both ends of a service",
        ),
        pytest.param(
            ["--from", "grpc://h:1", "--name", "acme/views", "--count", "--tls-key", "k"],
            2,
            "--from does not go together with --count and --tls-key",
            id="documents of a service",
        ),
        pytest.param(["--from", "grpc://h:1"], 2, "--name is missing", id="anything of a service"),
        pytest.param(
            ["--name", "acme/views", "--from", "h:1"], 2, "not grpc://host:port", id="no URL"
        ),
        pytest.param(
            ["--name", "acme/views", "--token-file", "t", "--tls-ca", "c"],
            2,
            "--token-file and --tls-ca without a service",
            id="a token for nobody",
        ),
        pytest.param(
            ["--name", "a/b", "--from", "grpc://h:1?ca=c", "--tls-ca", "c"],
            2,
            "--tls-ca is given, and in the URL",
            id="an authority twice",
        ),
        pytest.param(
            ["--name", "a/b", "--from", "grpc://192.0.2.1:1", "--token-file", "t"],
            2,
            "refusing to send a token to 192.0.2.1:1 without TLS",
            id="a token in clear",
        ),
        pytest.param(
            ["--name", "a/b", "--from", "grpc://127.0.0.1:1", "--token-file", "/nowhere"],
            1,
            "cannot read /nowhere",
            id="no token in the file",
        ),
        pytest.param(["--listen", "7070"], 2, "cannot listen on '7070'", id="no host"),
        pytest.param(
            ["--listen", "0.0.0.0:0"], 2, "without both TLS and tokens", id="an open port"
        ),
        pytest.param(
            ["--listen", "0.0.0.0:0", "--token-file", "t"],
            2,
            "add --token-file, --tls-cert and --tls-key",
            id="tokens in clear",
        ),
        pytest.param(
            ["--listen", "127.0.0.1:0", "--tls-cert", "c"], 2, "belong together", id="half of TLS"
        ),
        pytest.param(
            ["--listen", "127.0.0.1:0", "--token-file", "/nowhere"],
            2,
            "cannot read the token file /nowhere",
            id="no token file",
        ),
    ],
)
def test_what_cannot_be_meant_is_said_without_a_stack(
    data: Path, arguments: list[str], code: int, said: str
) -> None:
    done = penstock("shuffle", *arguments, data=data)
    assert done.exit_code == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_without_a_data_directory_it_says_what_to_do(tmp_path: Path) -> None:
    done = penstock("shuffle", "--name", "acme/views", data=tmp_path / "nowhere")
    assert done.exit_code == 1
    assert "penstock apply" in done.stderr
    assert not (tmp_path / "nowhere").exists()


def test_a_catalog_may_be_given_along(tmp_path: Path) -> None:
    catalog = tmp_path / "catalog.yaml"
    catalog.write_text(CATALOG)
    done = penstock(
        "shuffle", "--name", "acme/views", "--catalog", str(catalog), data=tmp_path / "data"
    )
    assert done.exit_code == 0, done.stderr
    assert done.stdout == ""


# ------------------------------------------------------------------------------- in good time


def test_following_goes_on_until_it_is_interrupted(tmp_path: Path) -> None:
    data = filled(tmp_path)
    before = sorted(data.rglob("*"))
    nowhere = {"PATH": "/nonexistent", "JAVA_HOME": "/nonexistent"}  # Spark is not needed
    with start(
        "--name", "acme/orders", "--follow", "--json", data=data, environ=nowhere
    ) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["documents"] == 40
        append(data, "acme/orders", 40, 41, 42)
        found = 0
        while found < 3:  # two partitions, which may come one by one
            found += json.loads(process.stdout.readline())["documents"]
        assert found == 3
        process.send_signal(signal.SIGINT)
        rest, said = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "")
    assert "Traceback" not in said
    assert said.splitlines()[-1].endswith("KiB")
    assert "43 documents" in said
    left = {path.name for path in data.rglob("*")} - {path.name for path in before}
    assert left <= {"consensus.db-wal", "consensus.db-shm"}


async def test_what_is_acknowledged_in_part_is_a_peek_and_the_rest_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PATIENCE_S", 0.05)
    limits = BatchLimits(journals=1)  # every ACK in a store transaction of its own
    async with world(tmp_path) as here:
        publisher = here.publisher(options=PublisherOptions(limits=limits))
        regions = ("eu", "eu", "us")
        await publisher.publish(0, batch([{"id": i, "region": r} for i, r in enumerate(regions)]))
        intents = await publisher.commit()
        first, *_ = close(intents, {}, limits).acks
        await here.journals.append_all(first)
        bindings = ad_hoc_bindings(ORDERS)
        session = await Session.open(
            Planner(journals=here.journals, blobs=here.blobs, schemas=here.schemas),
            bindings,
            now=wall_clock.now,
        )
        printed = command._Printed(as_json=False)
        checkpoints = command._checkpoints(session, command._head(session.states.values()))
        try:
            peek = await anext(checkpoints)
            printed.show(peek, bindings, [2, 0])
            coming = asyncio.ensure_future(anext(checkpoints))
            shown, said = capsys.readouterr()
            assert shown.startswith("#1  peek, 1 hint unresolved  2 documents  ")
            assert shown.endswith("  by shard 2 0\n")
            while "announced" not in said:
                done, _ = await asyncio.wait([coming], timeout=0.05)
                assert not done, "it is not caught up with what is announced"
                said += capsys.readouterr().err
            assert "acme/orders/region=us" in said
            await publisher.write_intents(intents)
            rest = await coming
            printed.show(rest, bindings, None)
            assert capsys.readouterr().out.startswith("#2  resolved  1 document  ")
            assert [each async for each in checkpoints] == []
        finally:
            await checkpoints.aclose()
            await session.close()
    assert (peek.documents, rest.documents) == (2, 1)


# ------------------------------------------------------------------------------------ as a service


def test_a_service_gives_other_processes_what_the_command_prints_here(tmp_path: Path) -> None:
    data = filled(tmp_path)
    local = penstock("shuffle", "--name", "acme/views", "--json", data=data)
    nowhere = tmp_path / "nowhere"  # whoever asks a service has no store
    with start("--listen", "127.0.0.1:0", data=data, environ={}) as service:
        assert service.stdout is not None
        listening = re.fullmatch(
            r"shuffle listening on (grpc://127\.0\.0\.1:[1-9]\d*)\n", service.stdout.readline()
        )
        assert listening is not None, service.communicate(timeout=60)
        asking = ["--from", listening[1], "--name"]
        limited = penstock("shuffle", *asking, "acme/views", "--limit", "2", "--json", data=nowhere)
        assert objects(limited) == objects(local)
        assert limited.stderr.startswith("acme/views reads acme/returns, acme/orders\n")
        idle = penstock("shuffle", *asking, "acme/idle", data=nowhere)
        assert (idle.exit_code, idle.stdout) == (0, "")
        assert "acme/idle reads nothing" in idle.stderr
        unknown = penstock("shuffle", *asking, "acme/veiws", data=nowhere)
        assert unknown.exit_code == 1
        assert "fix   did you mean acme/views" in unknown.stderr
        with start(*asking, "acme/returns", "--json", data=nowhere, environ={}) as follower:
            assert follower.stdout is not None
            assert json.loads(follower.stdout.readline())["documents"] == 2
            append(data, "acme/returns", 3)
            assert json.loads(follower.stdout.readline())["documents"] == 1
            follower.send_signal(signal.SIGINT)
            rest, said = follower.communicate(timeout=60)
        assert (follower.returncode, rest) == (0, "")
        assert said.splitlines()[-1].startswith("2 checkpoints, 3 documents, ")
        service.send_signal(signal.SIGTERM)
        rest, said = service.communicate(timeout=60)
    assert (service.returncode, rest) == (0, "")
    assert "Traceback" not in said
    assert not nowhere.exists()


def test_a_service_beyond_loopback_has_tls_and_tokens(data: Path, tmp_path: Path) -> None:
    ca, _ = certificate(tmp_path, "ca")
    cert, key = certificate(tmp_path, "server", "ca")
    known, secret, wrong = tmp_path / "tokens", tmp_path / "token", tmp_path / "wrong"
    known.write_text(f"ada reader * {hashlib.sha256(b'sesame').hexdigest()}\n")
    secret.write_text("sesame\n")
    wrong.write_text("barley\n")
    protected = ["--tls-cert", str(cert), "--tls-key", str(key), "--token-file", str(known)]
    with start("--listen", "0.0.0.0:0", *protected, "--json", data=data, environ={}) as service:
        assert service.stdout is not None
        said = "".join(service.stdout.readline() for _ in range(3))
        port = json.loads(said)["listening"].rpartition(":")[2]
        asking = ["--from", f"grpc://127.0.0.1:{port}", "--name", "acme/orders", "--limit", "1"]
        for options, code, words in (
            (["--tls-ca", str(ca), "--token-file", str(secret)], 0, "40 documents"),
            (["--tls-ca", str(ca), "--token-file", str(wrong)], 1, "the token is not valid"),
            (["--token-file", str(secret)], 1, "no connection to the shuffle service"),
        ):
            done = penstock("shuffle", *asking, *options, data=tmp_path / "nowhere")
            assert (done.exit_code, "Traceback" in done.stderr) == (code, False)
            assert words in done.stderr
        service.send_signal(signal.SIGTERM)
        _, said = service.communicate(timeout=60)
    assert service.returncode == 0, said
    assert "sesame" not in said


def test_hostile_clients_cost_a_service_nothing_and_do_not_end_it(
    data: Path, tmp_path: Path
) -> None:
    """Bodies without a token, messages without end, and TLS connections at SIGTERM."""
    cert, key = certificate(tmp_path, "server")
    known = tmp_path / "tokens"
    known.write_text(f"ada reader * {hashlib.sha256(b'sesame').hexdigest()}\n")
    known.chmod(0o600)
    large = [("grpc.max_send_message_length", -1)]
    credentials = grpc.ssl_channel_credentials(cert.read_bytes())

    def told(port: int, token: str) -> grpc.StatusCode:
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials, large) as channel:
            session = channel.stream_stream(wire.SESSION)
            metadata = (("authorization", f"Bearer {token}"),)
            body = iter([bytes(150 << 20)])
            with pytest.raises(grpc.RpcError) as refused:
                list(session(body, metadata=metadata, timeout=60))
            code: grpc.StatusCode = refused.value.code()
            return code

    protected = ["--tls-cert", str(cert), "--tls-key", str(key), "--token-file", str(known)]
    with start("--listen", "127.0.0.1:0", *protected, data=data, environ={}) as service:
        assert service.stdout is not None
        port = int(service.stdout.readline().rpartition(":")[2])
        before = peak_mib(service.pid)
        assert told(port, "barley") is grpc.StatusCode.UNAUTHENTICATED
        assert told(port, "sesame") is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert peak_mib(service.pid) - before < 40
        with connecting(port, threads=4) as made:
            while made[0] < 200 and service.poll() is None:
                time.sleep(0.05)
            service.send_signal(signal.SIGTERM)
            _, said = service.communicate(timeout=60)
    assert service.returncode == 0, said
    assert "Traceback" not in said


# ------------------------------------------------------------------------------------------ Spark


@pytest.mark.spark
def test_documents_are_counted_at_the_shards_that_own_them(data: Path) -> None:
    quick = "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"  # two jobs, and no more
    arguments = ["--name", "acme/views", "--count", "--master", "local[1]", "--conf", quick]
    with start(*arguments, data=data, environ={}) as process:
        out, said = process.communicate(timeout=500)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    found = [line.rpartition("by shard ")[2].split() for line in out.splitlines()]
    for counts, ids in zip(found, (range(40), (1, 2)), strict=True):
        owners = Counter(shard_of(key_hash(pack([i])), 3) for i in ids)
        assert counts == [str(owners[shard]) for shard in range(3)]
