"""Tokens open what they were made for, and a broken file opens nothing new."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

import pytest

from penstock.consensus.committer.auth import Access, Principal, TokenFile, parse_tokens
from penstock.consensus.committer.client import RpcConsensus
from penstock.consensus.store import Determinate, ErrorKind
from penstock.errors import UsageError, UserError


def line(name: str, role: str, prefix: str, token: str) -> str:
    return f"{name} {role} {prefix} {hashlib.sha256(token.encode()).hexdigest()}\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text(
        "# people\n"
        + line("ann", "reader", "journal/", "t-ann")
        + line("bob", "admin", "*", "t-bob")
    )
    return file


def test_a_token_is_somebody(path: Path) -> None:
    tokens = TokenFile(path)
    assert tokens.authenticate("Bearer t-ann").name == "ann"
    assert tokens.authenticate("bearer t-bob").access is Access.ADMIN


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(None, id="none"),
        pytest.param("", id="empty"),
        pytest.param("Bearer", id="no token"),
        pytest.param("Bearer wrong", id="wrong"),
        pytest.param("Basic t-ann", id="another scheme"),
        pytest.param("t-ann", id="no scheme"),
    ],
)
def test_anything_else_is_nobody(path: Path, header: str | None) -> None:
    with pytest.raises(Determinate) as caught:
        TokenFile(path).authenticate(header)
    assert caught.value.kind is ErrorKind.UNAUTHENTICATED
    assert "t-ann" not in str(caught.value)


SCOPED = Principal(name="s", access=Access.WRITE, prefix="journal/acme/")
OTHER = Principal(name="o", access=Access.WRITE, prefix="task/")
READER = Principal(name="r", access=Access.READ, prefix="journal/")
WRITER = Principal(name="w", access=Access.WRITE, prefix="journal/")
ADMIN = Principal(name="a", access=Access.ADMIN, prefix="")


@pytest.mark.parametrize(
    ("who", "needed", "key", "allowed"),
    [
        (READER, Access.READ, "journal/a", True),
        (READER, Access.READ, "task/a", False),
        (READER, Access.READ, "", False),  # a watch of everything
        (READER, Access.WRITE, "journal/a", False),
        (WRITER, Access.WRITE, "journal/a", True),
        (WRITER, Access.READ, "journal/a", True),
        (WRITER, Access.WRITE, "journa", False),
        (WRITER, Access.ADMIN, "journal/", False),
        (SCOPED, Access.WRITE, "journal/acme/orders/pivot=00", True),
        (SCOPED, Access.WRITE, "journal/acmecorp/orders/pivot=00", False),
        (SCOPED, Access.WRITE, "journal/", False),
        (SCOPED, Access.READ, "journal/other/x/pivot=00", False),
        (SCOPED, Access.READ, "catalog/main", True),
        (SCOPED, Access.READ, "schema/0123", True),
        (SCOPED, Access.READ, "LIVENESS", True),
        (SCOPED, Access.WRITE, "catalog/main", False),
        (SCOPED, Access.WRITE, "schema/0123", False),
        (SCOPED, Access.WRITE, "LIVENESS", False),
        (SCOPED, Access.READ, "catalog/", False),
        (SCOPED, Access.READ, "catalog/main2", False),
        (SCOPED, Access.READ, "", False),
        (OTHER, Access.READ, "catalog/main", False),
        (ADMIN, Access.ADMIN, "", True),
        (ADMIN, Access.WRITE, "anything", True),
    ],
)
def test_roles_and_prefixes_limit(who: Principal, needed: Access, key: str, allowed: bool) -> None:
    if allowed:
        who.check(needed, key)
        return
    with pytest.raises(Determinate) as caught:
        who.check(needed, key)
    assert caught.value.kind is ErrorKind.PERMISSION_DENIED


def test_every_line_is_compared_in_constant_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    real = hmac.compare_digest

    def count(one: str, other: str) -> bool:
        compared.append(one)
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", count)
    TokenFile(path).authenticate("Bearer t-ann")
    assert len(compared) == 2


def test_the_file_is_read_again_when_it_changes_and_a_broken_one_keeps_the_last_good(
    path: Path,
) -> None:
    tokens = TokenFile(path)
    path.write_text(line("cid", "writer", "*", "t-cid"))
    os.utime(path, ns=(1, 1))
    assert tokens.authenticate("Bearer t-cid").name == "cid"
    with pytest.raises(Determinate):
        tokens.authenticate("Bearer t-ann")
    path.write_text("cid writer * not-a-digest\n")
    assert tokens.authenticate("Bearer t-cid").name == "cid"
    path.unlink()
    assert tokens.authenticate("Bearer t-cid").name == "cid"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "ann reader journal/\n",
        "ann king * " + "0" * 64,
        "ann reader * secret-token",
        "ann reader * " + "0" * 64 + " until=2027-01-31",
        "ann reader * " + "0" * 64 + " until=tomorrow",
        "ann reader * " + "0" * 64 + " since=2027-01-31T00:00:00Z",
        "ann reader * " + "0" * 64 + " until=2027-01-31T00:00:00Z more",
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_without_quoting_it(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_tokens(text, where="tokens")
    assert "secret-token" not in str(caught.value)
    assert caught.value.fix is not None


def test_a_token_ends_when_its_line_says_so(path: Path) -> None:
    digest = hashlib.sha256(b"t-ann").hexdigest()
    path.write_text(f"ann reader * {digest} until=2020-01-01T00:00:00Z\n")
    with pytest.raises(Determinate, match="expired"):
        TokenFile(path).authenticate("Bearer t-ann")
    path.write_text(f"ann reader * {digest} until=2999-01-01T00:00:00+02:00\n")
    tokens = TokenFile(path)
    ann = tokens.authenticate("Bearer t-ann")
    assert tokens.in_force(ann)
    path.write_text(line("ann", "reader", "*", "t-ann"))
    assert not tokens.in_force(ann)
    assert digest not in repr(ann)


def test_a_file_that_others_may_write_is_refused_also_later(path: Path) -> None:
    tokens = TokenFile(path)
    path.write_text(line("eve", "admin", "*", "t-eve"))
    path.chmod(0o666)
    with pytest.raises(Determinate):
        tokens.authenticate("Bearer t-eve")
    assert tokens.authenticate("Bearer t-ann").name == "ann"
    with pytest.raises(UserError, match="others may write"):
        TokenFile(path)
    path.chmod(0o644)
    assert tokens.authenticate("Bearer t-eve").name == "eve"


def test_a_file_that_is_no_text_is_refused(path: Path) -> None:
    tokens = TokenFile(path)
    path.write_bytes(b"\xff\x00\xfe" * 100)
    assert tokens.authenticate("Bearer t-ann").name == "ann"
    with pytest.raises(UserError, match="not text"):
        TokenFile(path)


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("grpc://127.0.0.1:1", True),
        ("grpc://[::1]:1", True),
        ("grpc://localhost:1", True),
        ("grpc+unix:///run/nowhere/p.sock", True),
        ("grpc://192.0.2.1:1", False),
        ("grpc://0.0.0.0:1", False),
        ("grpc://db.example:1", False),
        ("grpc://ip6-localhost:1", False),
    ],
)
def test_no_token_goes_in_clear_to_another_host(tmp_path: Path, url: str, allowed: bool) -> None:
    token = tmp_path / "token"
    token.write_text("sesame\n")
    if allowed:
        RpcConsensus(f"{url}?token_file={token}")
        return
    RpcConsensus(url)
    with pytest.raises(UsageError, match="without TLS") as caught:
        RpcConsensus(f"{url}?token_file={token}")
    assert "sesame" not in str(caught.value)


async def test_a_client_says_what_is_wrong_with_its_token_file(tmp_path: Path) -> None:
    token = tmp_path / "token"
    url = f"grpc://127.0.0.1:1?token_file={token}"
    with pytest.raises(UserError, match="cannot read"):
        RpcConsensus(url)
    for wrong in (b"", b"\xff\xfe", b"two\nlines\n"):
        token.write_bytes(wrong)
        with pytest.raises(UserError, match="no token in"):
            RpcConsensus(url)
    token.write_bytes(b"sesame\n")
    store = RpcConsensus(url)
    token.chmod(0o666)
    for call in (store.head("k"), store.scan("k", 0), anext(store.watch("", 0))):
        with pytest.raises(Determinate, match="others may write") as caught:
            await call
        assert caught.value.kind is ErrorKind.UNAUTHENTICATED
    await store.close()
