"""Whatever a command says of an error, also with --debug, no password is in it."""

from __future__ import annotations

import io
import json
import logging
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
import typer
from typer.testing import CliRunner

from penstock.cli import append, doctor, journals, persistd
from penstock.cli.frame import register
from penstock.connectors.postgres.server import Server
from penstock.consensus.committer.client import RpcConsensus
from penstock.consensus.postgres import check_url
from penstock.errors import UsageError, UserError
from penstock.runtime.connector.common import ConnectorError
from penstock.runtime.secrets import resolve
from penstock.runtime.task_log import _TASK, _Collector
from penstock.servicekit import logs, secrets
from penstock.servicekit.secrets import conceal, mask
from penstock.settings import Settings
from penstock.testing.postgres import PostgresServer

app = typer.Typer()
for command in (append.append, journals.journals, persistd.persistd):
    register(app, command)


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root, package = logging.getLogger(), logging.getLogger("penstock")
    before = (list(root.handlers), root.level, package.level)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    package.setLevel(before[2])


@pytest.fixture(autouse=True)
def _nothing_concealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins as a process does."""
    monkeypatch.setattr(secrets, "_concealed", OrderedDict())
    monkeypatch.setattr(secrets, "_pattern", None)


URLS = [
    pytest.param("postgresql://u:hunter22@127.0.0.1:1/d", id="a server that is not there"),
    pytest.param("postgresql://u:pre@hunter22@127.0.0.1:1/d", id="@ in it"),
    pytest.param("postgresql://u:pre/hunter22@127.0.0.1:1/d", id="/ in it"),
    pytest.param("postgresql://u:pre?hunter22@127.0.0.1:1/d", id="? in it"),
    pytest.param("postgresql://u:pre#hunter22@127.0.0.1:1/d", id="# in it"),
    pytest.param("postgresql://u:pre%40hunter22@127.0.0.1:1/d", id="encoded"),
    pytest.param("postgresql://u:%zzhunter22@127.0.0.1:1/d", id="encoded wrongly"),
    pytest.param("postgresql://u:hunter22@127.0.0.1:port/d", id="a port that is none"),
    pytest.param("postgresql://127.0.0.1:1/d?user=u&password=hunter22", id="an option"),
    pytest.param("postgresql://127.0.0.1:1/d?passwort=hunter22", id="an option that is none"),
    pytest.param("postgresql://u:hunter22@[::1/d", id="a bracket that is open"),
    pytest.param("host=127.0.0.1 port=1 password=hunter22", id="a DSN"),
    pytest.param("host=127.0.0.1 password = 'a hunter22'", id="a DSN with spaces"),
    pytest.param("sqlite://u:hunter22@host/c.db", id="SQLite"),
    pytest.param("sqlite://u:hunter22@host/c.db?mode=ro", id="SQLite with options"),
    pytest.param("grpc://u:hunter22@127.0.0.1:1", id="a committer"),
    pytest.param("grpc://hunter22@127.0.0.1:1", id="a token for a user"),
    pytest.param("grpc://127.0.0.1:1?token=hunter22", id="a token"),
    pytest.param("grpc+unix://hunter22@/run/p.sock", id="a socket"),
    pytest.param("mysql://u:hunter22@h/d", id="no such store"),
    pytest.param("u:hunter22@h", id="no URL"),
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    "arguments", [("journals",), ("append", "a/b"), ("persistd", "--check")], ids=lambda a: a[0]
)
def test_a_command_that_fails_shows_no_password(url: str, arguments: tuple[str, ...]) -> None:
    for debug in ((), ("--debug",)):
        result = CliRunner().invoke(app, [*arguments, "--consensus", url, *debug], input="{}")
        assert result.exit_code in (1, 2)
        assert "hunter22" not in result.output + result.stderr
        assert ("Traceback" in result.stderr) == bool(debug)


@pytest.mark.parametrize("url", ["u:a@b@h/d", "u:a/b@h/d", "u:a@h/d@x"])
def test_a_url_that_libpq_reads_otherwise_than_we_do_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        check_url(f"postgresql://{url}")
    for fine in ("u:a?b@h/d", "u:a%40b@h/d", "h/d?application_name=me@x", "h1,h2/d"):
        check_url(f"postgresql://{fine}")


def test_the_errors_below_an_error_are_masked_too() -> None:
    def fails(settings: Settings) -> None:
        """Fail."""
        conceal("open-sesame-1")
        try:
            raise psycopg.OperationalError("host=h password=hunter22, or was it open-sesame-1")
        except psycopg.Error as error:
            raise UserError("no connection") from error

    failing = typer.Typer()
    register(failing, fails)
    result = CliRunner().invoke(failing, ["--debug"])
    assert result.exit_code == 1
    assert "OperationalError: host=h password=<redacted>" in result.stderr
    assert not {"hunter22", "open-sesame-1"} & set(re.split(r"[\s=,]", _below(result.stderr)))


def _below(text: str) -> str:
    """What the exceptions said, without the lines of this file that a stack trace quotes."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


@pytest.mark.parametrize("url", URLS)
def test_nor_does_the_doctor(url: str, tmp_path: Path) -> None:
    settings = Settings.resolve({"consensus": url, "data": tmp_path}, {})
    finding = doctor._examine("consensus", doctor._consensus, settings)
    assert not finding.ok
    assert "hunter22" not in mask(f"{finding.detail} {finding.fix}")
    assert "hunter22" not in f"{finding.detail} {finding.fix}"


@pytest.mark.postgres
@pytest.mark.parametrize("password", ["hunter22@host", "hunter22/x", "a b'hunter22\\", "hünter22%"])
def test_a_password_that_the_server_refuses_is_not_shown(
    postgres: PostgresServer, password: str
) -> None:
    url = postgres.url().replace(":penstock@", f":{quote(password, safe='')}@")
    for arguments in (("journals",), ("persistd", "--check")):
        result = CliRunner().invoke(app, [*arguments, "--consensus", url, "--debug"])
        assert result.exit_code == 1
        assert "password authentication failed" in result.stderr
        assert "nter22" not in result.output + result.stderr


@pytest.mark.postgres
@pytest.mark.parametrize("password", ["hunter22@host", "a b'hunter22\\", "pw"])
def test_an_endpoint_does_not_show_it_either(
    postgres: PostgresServer, password: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDPOINT", password)
    at = psycopg.conninfo.conninfo_to_dict(postgres.url())
    config = {
        "address": f"{at['host']}:{at['port']}",
        "database": str(at["dbname"]),
        "user": str(at["user"]),
        "password": "${env:ENDPOINT}",
    }
    with pytest.raises(ConnectorError) as caught:
        Server.of(config, "acme/out").connect()
    assert password not in str(caught.value)
    assert password not in repr(Server.of(config, "acme/out"))


def test_a_value_behind_a_reference_is_hidden_wherever_it_turns_up_afterwards() -> None:
    config = {
        "password": "${env:PW}",
        "address": "${env:PLACE}",
        "headers": {"Authorization": "B ${env:T}"},
    }
    environ = {"PW": "open sesame/1", "PLACE": "db.example", "T": "abcdef-123456"}
    resolve(config, where="x", environ=environ)
    said = mask("the driver said open sesame/1, open%20sesame%2F1 and abcdef-123456 of db.example")
    assert said == "the driver said <redacted>, <redacted> and <redacted> of db.example"


@pytest.mark.parametrize("as_json", [False, True])
def test_logs_show_no_secret_however_it_gets_there(as_json: bool) -> None:
    stream = io.StringIO()
    logs.configure(level="debug", as_json=as_json, stream=stream)
    log = logging.getLogger("penstock.test")
    try:
        raise psycopg.OperationalError('host name "x" in "host=h password=\'hunter 22\'"')
    except psycopg.Error as error:
        log.exception("failed", extra=logs.fields(error=error, password="hunter 22"))  # noqa: S106
    log.info("headers %s", {"Authorization": "Bearer hunter22", "x-api-token": "hunter22"})
    log.info("config", extra=logs.fields(config={"user": "u", "password": "hunter22"}))
    assert "hunter" not in stream.getvalue()
    assert " 22" not in stream.getvalue()


async def test_nor_does_the_log_that_a_task_keeps() -> None:
    collector = _Collector("materialization", "acme/out", logging.INFO)
    token = _TASK.set(("materialization", "acme/out"))
    try:
        record = logging.LogRecord(
            "x", logging.INFO, "f", 1, "lost %s", ("postgresql://u:hunter22@h/d",), None
        )
        record.fields = {  # type: ignore[attr-defined]
            "error": "password=hunter22", "token": "hunter22", "config": {"password": "hunter22"},
        }  # fmt: skip
        collector.emit(record)
    finally:
        _TASK.reset(token)
    kept = collector.take()
    assert [document["message"] for document in kept] == ["lost postgresql://u:<redacted>@h/d"]
    assert "hunter22" not in json.dumps(kept)


@pytest.mark.parametrize(
    "wrong", [{"password": ["hunter22"]}, {"sslmode": "hunter22"}, {"passwort": "hunter22"}]
)
def test_a_configuration_that_is_wrong_is_refused_without_its_values(
    wrong: dict[str, object],
) -> None:
    config = {"address": "h", "database": "d", "user": "u", **wrong}
    with pytest.raises(UserError) as caught:
        Server.of(config, "acme/out")  # type: ignore[arg-type]
    assert "hunter22" not in str(caught.value)


def test_the_url_of_a_store_is_masked_in_its_repr_and_errors() -> None:
    with pytest.raises(UserError) as caught:
        RpcConsensus("grpc://127.0.0.1:1?token=hunter22")
    assert "hunter22" not in str(caught.value)
