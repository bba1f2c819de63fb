"""`penstock persistd` refuses what cannot be meant, with exit code 2 and a way out."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from penstock.cli import persistd
from penstock.cli.frame import register
from penstock.errors import UsageError
from penstock.testing.postgres import PostgresServer

app = typer.Typer()
register(app, persistd.persistd)


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root, package = logging.getLogger(), logging.getLogger("penstock")
    before = (list(root.handlers), root.level, package.level)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    package.setLevel(before[2])


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        pytest.param(("--stats-heartbeat-interval", "5"), "with a unit", id="B6: a bare number"),
        pytest.param(("--stats-heartbeat-interval", "soon"), "with a unit", id="B6: a word"),
        pytest.param(("--max-cached-bytes", "10"), "with a unit", id="B6: bytes without unit"),
        pytest.param(("--max-entry-bytes", "1Mib"), "with a unit", id="no such unit"),
        pytest.param(("--listen", "6882"), "cannot listen", id="no host"),
        pytest.param(("--listen", "0.0.0.0:0"), "without both TLS and tokens", id="open port"),
        pytest.param(("--tls-cert", "x"), "belong together", id="half of TLS"),
        pytest.param(("--tls-client-ca", "x"), "needs --tls-cert", id="client CA alone"),
        pytest.param(("--token-file", "/nowhere"), "cannot read", id="no token file"),
        pytest.param(("--consensus", "grpc://h:1"), "needs a database", id="a committer"),
        pytest.param(("--consensus", "postgre://h/d"), "unknown scheme", id="misspelt scheme"),
        pytest.param(
            ("--consensus", "mysql://u:hunter2@h/d"), "unknown scheme", id="no such store"
        ),
    ],
)
def test_bad_usage_is_exit_2(tmp_path: Path, flags: tuple[str, ...], says: str) -> None:
    code, output = run("--consensus", f"sqlite:///{tmp_path}/c.db", "--metrics-port", "0", *flags)
    assert code == 2
    assert says in output
    assert "Traceback" not in output
    assert "hunter2" not in output


@pytest.mark.parametrize(
    ("text", "want"), [("5s", 5.0), ("250ms", 0.25), ("0s", 0.0), ("1.5m", 90.0), ("2 h", 7200.0)]
)
def test_durations_have_units(text: str, want: float) -> None:
    """B6."""
    assert persistd.seconds(text, "--x") == want


@pytest.mark.parametrize(("text", "want"), [("64MiB", 64 << 20), ("1KiB", 1024), ("7B", 7)])
def test_sizes_have_units(text: str, want: int) -> None:
    assert persistd.size(text, "--x") == want
    with pytest.raises(UsageError):
        persistd.size("64", "--x")


def test_check_opens_the_store_and_says_which(tmp_path: Path) -> None:
    """B24: run in the final image, it loads everything the daemon needs."""
    url = f"sqlite:///{tmp_path}/c.db"
    code, output = run("--consensus", url, "--check")
    assert code == 0
    assert "is ready, store " in output
    code, output = run("--consensus", url, "--check", "--json")
    assert code == 0
    assert len(json.loads(output)["incarnation"]) == 32


@pytest.mark.postgres
def test_a_wrong_password_is_an_error_that_does_not_show_it(postgres: PostgresServer) -> None:
    url = postgres.url().replace(":penstock@", ":hunter2@")
    code, output = run("--consensus", url, "--check")
    assert code == 1
    assert "password authentication failed" in output
    assert "hunter2" not in output
    assert "Traceback" not in output


def test_help_shows_an_example() -> None:
    code, output = run("--help")
    assert code == 0
    assert "Example:" in output
