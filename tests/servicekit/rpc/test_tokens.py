"""Tokens open what they were made for, and a broken file opens nothing new."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

import pytest

from penstock.errors import UserError
from penstock.servicekit.rpc.tokens import Access, Principal, TokenFile, TokenRefusal, parse_tokens


def line(name: str, role: str, prefix: str, token: str) -> str:
    return f"{name} {role} {prefix} {hashlib.sha256(token.encode()).hexdigest()}\n"


def known(tokens: TokenFile, authorization: str) -> Principal:
    found = tokens.recognize(authorization)
    assert isinstance(found, Principal)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text(
        "# people\n"
        + line("ann", "reader", "journal/", "t-ann")
        + line("bob", "admin", "*", "t-bob")
    )
    return file


def test_a_token_identifies_a_principal(path: Path) -> None:
    tokens = TokenFile(path)
    assert known(tokens, "Bearer t-ann").name == "ann"
    assert known(tokens, "bearer t-bob").is_unlimited
    assert not known(tokens, "bearer t-ann").is_unlimited


@pytest.mark.parametrize(
    ("header", "why"),
    [
        pytest.param(None, TokenRefusal.MISSING, id="none"),
        pytest.param("", TokenRefusal.MISSING, id="empty"),
        pytest.param("Bearer", TokenRefusal.INVALID, id="no token"),
        pytest.param("Bearer wrong", TokenRefusal.INVALID, id="wrong"),
        pytest.param("Basic t-ann", TokenRefusal.INVALID, id="another scheme"),
        pytest.param("t-ann", TokenRefusal.INVALID, id="no scheme"),
    ],
)
def test_anything_else_is_refused(path: Path, header: str | None, why: TokenRefusal) -> None:
    assert TokenFile(path).recognize(header) is why


@pytest.mark.parametrize(
    ("role", "prefix", "needed", "key", "allowed"),
    [
        ("reader", "a/", Access.READ, "a/b", True),
        ("reader", "a/", Access.READ, "b/a", False),
        ("reader", "a/", Access.READ, "", False),  # everything
        ("reader", "a/", Access.LIST, "a/b", True),
        ("reader", "a/", Access.APPEND, "a/b", False),
        ("reader", "a/", Access.APPLY, "a/b", False),
        *(("writer", "a/", each, "a/b", True) for each in Access),
        *(("writer", "a/", each, "b/a", False) for each in Access),
        *(("admin", "a/", each, "b/", True) for each in Access),
        *((has.word, "a/", each, "a/b", has is each) for has in Access for each in Access),
        ("list,append", "*", Access.APPEND, "b", True),
        ("list,append", "*", Access.LIST, "b", True),
        ("list,append", "*", Access.READ, "b", False),
        ("list,append", "a/", Access.LIST, "b", False),
    ],
)
def test_roles_and_prefixes_limit(
    role: str, prefix: str, needed: Access, key: str, allowed: bool
) -> None:
    [who] = parse_tokens(line("ann", role, prefix, "t-ann"), where="tokens")
    assert who.allows(needed, key) is allowed


def test_every_line_is_compared_in_constant_time(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[str] = []
    real = hmac.compare_digest

    def count(one: str, other: str) -> bool:
        compared.append(one)
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", count)
    TokenFile(path).recognize("Bearer t-ann")
    assert len(compared) == 2


def test_the_file_is_read_again_when_it_changes_and_a_broken_one_keeps_the_last_good(
    path: Path,
) -> None:
    tokens = TokenFile(path)
    path.write_text(line("cid", "writer", "*", "t-cid"))
    os.utime(path, ns=(1, 1))
    assert known(tokens, "Bearer t-cid").name == "cid"
    assert tokens.recognize("Bearer t-ann") is TokenRefusal.INVALID
    path.write_text("cid writer * not-a-digest\n")
    assert known(tokens, "Bearer t-cid").name == "cid"
    path.unlink()
    assert known(tokens, "Bearer t-cid").name == "cid"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n",
        "ann reader journal/\n",
        "ann read,write * " + "0" * 64,
        "ann read, * " + "0" * 64,
        "ann reader,append * " + "0" * 64,
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
    assert TokenFile(path).recognize("Bearer t-ann") is TokenRefusal.EXPIRED
    path.write_text(f"ann reader * {digest} until=2999-01-01T00:00:00+02:00\n")
    tokens = TokenFile(path)
    ann = known(tokens, "Bearer t-ann")
    assert tokens.in_force(ann)
    path.write_text(line("ann", "reader", "*", "t-ann"))
    assert not tokens.in_force(ann)
    assert digest not in repr(ann)


def test_a_file_that_others_may_write_is_refused_also_later(path: Path) -> None:
    tokens = TokenFile(path)
    path.write_text(line("eve", "admin", "*", "t-eve"))
    path.chmod(0o666)
    assert tokens.recognize("Bearer t-eve") is TokenRefusal.INVALID
    assert known(tokens, "Bearer t-ann").name == "ann"
    with pytest.raises(UserError, match="others may write"):
        TokenFile(path)
    path.chmod(0o644)
    assert known(tokens, "Bearer t-eve").name == "eve"


def test_a_file_that_is_no_text_is_refused(path: Path) -> None:
    tokens = TokenFile(path)
    path.write_bytes(b"\xff\x00\xfe" * 100)
    assert known(tokens, "Bearer t-ann").name == "ann"
    with pytest.raises(UserError, match="not text"):
        TokenFile(path)
