"""A token opens the keys it was made for, and is sent only where it is safe."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.catalog.desired import CATALOG_KEY
from penstock.cluster.state import log_key
from penstock.cluster.unified import MAIN
from penstock.consensus.committer.access import check_access, check_write
from penstock.consensus.committer.client import RpcConsensus
from penstock.consensus.store import Determinate, ErrorKind
from penstock.errors import UsageError, UserError
from penstock.servicekit.rpc.tokens import EVERYTHING, Access, Principal

SCOPED = Principal(name="s", access=EVERYTHING, prefix="journal/acme/")
OTHER = Principal(name="o", access=EVERYTHING, prefix="task/")
READER = Principal(name="r", access=Access.READ | Access.LIST, prefix="journal/")
WRITER = Principal(name="w", access=EVERYTHING, prefix="journal/")
APPENDS = Principal(name="p", access=Access.READ | Access.APPEND, prefix="")
APPLIES = Principal(name="y", access=Access.READ | Access.APPLY, prefix="")
ADMIN = Principal(name="a", access=EVERYTHING, prefix="")


@pytest.mark.parametrize(
    ("who", "needed", "key", "allowed"),
    [
        (READER, Access.READ, "journal/a", True),
        (READER, Access.READ, "task/a", False),
        (READER, Access.READ, "", False),  # a watch of everything
        (READER, Access.APPEND, "journal/a", False),
        (WRITER, Access.APPEND, "journal/a", True),
        (WRITER, Access.READ, "journal/a", True),
        (WRITER, Access.APPEND, "journa", False),
        (WRITER, Access.LIST, "journal/", True),
        (WRITER, Access.LIST, "", False),
        (READER, Access.LIST, "journal/a", True),
        (APPENDS, Access.LIST, "journal/", False),
        (APPENDS, Access.READ, "catalog/main", True),
        (SCOPED, Access.APPEND, "journal/acme/orders/pivot=00", True),
        (SCOPED, Access.APPEND, "journal/acmecorp/orders/pivot=00", False),
        (SCOPED, Access.APPEND, "journal/", False),
        (SCOPED, Access.READ, "journal/other/x/pivot=00", False),
        (SCOPED, Access.READ, "catalog/main", True),
        (SCOPED, Access.READ, "schema/0123", True),
        (SCOPED, Access.READ, "LIVENESS", True),
        (SCOPED, Access.APPEND, "catalog/main", False),
        (SCOPED, Access.APPEND, "schema/0123", False),
        (SCOPED, Access.APPEND, "LIVENESS", False),
        (SCOPED, Access.READ, "catalog/", False),
        (SCOPED, Access.READ, "catalog/main2", False),
        (SCOPED, Access.READ, "", False),
        (OTHER, Access.READ, "catalog/main", False),
        (ADMIN, Access.LIST, "", True),
        (ADMIN, Access.APPEND, "anything", True),
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
    ("who", "key", "word"),
    [
        (APPENDS, "journal/acme/orders/pivot=00", None),
        (APPENDS, "recovery/capture/acme", None),
        (APPENDS, CATALOG_KEY, "apply"),
        (APPENDS, log_key(MAIN), "apply"),
        (APPENDS, "request/acme/views", "apply"),
        (APPLIES, CATALOG_KEY, None),
        (APPLIES, log_key(MAIN), None),
        (APPLIES, "journal/acme/orders/pivot=00", "append"),
        (READER, "journal/acme/orders/pivot=00", "append"),
        (SCOPED, CATALOG_KEY, "apply"),
        (ADMIN, CATALOG_KEY, None),
    ],
)
def test_who_writes_documents_does_not_say_what_runs(
    who: Principal, key: str, word: str | None
) -> None:
    if word is None:
        check_write(who, key)
        return
    with pytest.raises(Determinate, match=f"may not {word} ") as caught:
        check_write(who, key)
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
