"""Tokens open what they were made for, and a broken file opens nothing new."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

import pytest

from penstock.consensus.committer.auth import Access, Principal, TokenFile, parse_tokens
from penstock.consensus.store import Determinate, ErrorKind
from penstock.errors import UserError


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
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_without_quoting_it(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_tokens(text, where="tokens")
    assert "secret-token" not in str(caught.value)
    assert caught.value.fix is not None
