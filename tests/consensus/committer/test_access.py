"""A token opens the keys it was made for, and is sent only where it is safe."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.consensus.committer.access import check_access
from penstock.consensus.committer.client import RpcConsensus
from penstock.consensus.store import Determinate, ErrorKind
from penstock.errors import UsageError, UserError
from penstock.servicekit.rpc.tokens import Access, Principal

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
        check_access(who, needed, key)
        return
    with pytest.raises(Determinate) as caught:
        check_access(who, needed, key)
    assert caught.value.kind is ErrorKind.PERMISSION_DENIED


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
