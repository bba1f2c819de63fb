from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.consensus.store import (
    Determinate,
    ErrorKind,
    Indeterminate,
    VersionedData,
    cause_chain,
    mask_url,
)

FINAL = {
    ErrorKind.INVALID_ARGUMENT,
    ErrorKind.TOO_LARGE,
    ErrorKind.TRUNCATE_BOUND,
    ErrorKind.UNAUTHENTICATED,
    ErrorKind.PERMISSION_DENIED,
    ErrorKind.STORE_RESET,
}


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        pytest.param("memory:", "memory:", id="nothing to hide"),
        pytest.param("sqlite:////var/p.db", "sqlite:////var/p.db", id="a path"),
        pytest.param(
            "postgresql://u:pw@h:5432/d", "postgresql://u:<redacted>@h:5432/d", id="a password"
        ),
        pytest.param("postgresql://u@h/d", "postgresql://u@h/d", id="a user without password"),
        pytest.param(
            "postgresql://u:p@s/w@h/d", "postgresql://u:<redacted>@h/d", id="@ and / unescaped"
        ),
        pytest.param("postgresql://u:p?w@h/d", "postgresql://u:<redacted>@h/d", id="? unescaped"),
        pytest.param(
            "postgresql://h:1/d?password=pw&sslmode=require",
            "postgresql://h:1/d?password=<redacted>&sslmode=require",
            id="a password as an option",
        ),
        pytest.param(
            "grpc://h:1?Token=abc&tls=on&sslkey=k",
            "grpc://h:1?Token=<redacted>&tls=on&sslkey=<redacted>",
            id="names that sound secret",
        ),
        pytest.param("u:pw@h", "u:<redacted>@h", id="no scheme at all"),
        pytest.param(
            "postgresql://h:1/d?application_name=me@x",
            "postgresql://h:<redacted>@x",
            id="@ in an option: too much is better than too little",
        ),
    ],
)
def test_masking_hides_secrets_and_nothing_else(url: str, masked: str) -> None:
    assert mask_url(url) == masked


@given(st.text(alphabet="ab:@/?#%&= ", min_size=1, max_size=12))
def test_no_password_survives_masking(noise: str) -> None:
    word = "hunter2"
    for password in (word + noise, noise + word, noise + word + noise):
        assert word not in mask_url(f"postgresql://user:{password}@host:5432/db")


def test_the_chain_of_causes_is_one_line_with_codes() -> None:
    class Refused(Exception):
        sqlstate = "42P01"

    error = ConnectionError("query failed")
    error.__cause__ = Refused('relation "x"\n does not exist')
    chain = cause_chain(error)
    assert chain == 'query failed: relation "x" does not exist [42P01]'


def test_a_chain_that_bites_its_tail_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert cause_chain(one) == "one: two"


@pytest.mark.parametrize("kind", list(ErrorKind))
@pytest.mark.parametrize("cls", [Determinate, Indeterminate])
def test_errors_survive_pickling(cls: type[Determinate | Indeterminate], kind: ErrorKind) -> None:
    error = cls(kind, "what happened", retry_after_ms=5)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(again) is cls
    assert (again.kind, again.message, again.retry_after_ms) == (kind, "what happened", 5)
    assert str(again) == str(error) == f"{kind.value}: what happened"
    assert kind.final == (kind in FINAL)


def test_an_entry_is_its_seqno_and_its_bytes() -> None:
    assert VersionedData(1, b"a", revision=7) == VersionedData(1, b"a")
    assert VersionedData(1, b"a") != VersionedData(1, b"b")
    assert (
        repr(VersionedData(1, bytes(100), revision=3)) == "VersionedData(1, 100 bytes, revision=3)"
    )
