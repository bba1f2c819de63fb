from __future__ import annotations

import pickle

import pytest

from penstock.consensus.store import (
    Determinate,
    ErrorKind,
    Indeterminate,
    VersionedData,
    cause_chain,
)

FINAL = {
    ErrorKind.INVALID_ARGUMENT,
    ErrorKind.TOO_LARGE,
    ErrorKind.TRUNCATE_BOUND,
    ErrorKind.UNAUTHENTICATED,
    ErrorKind.PERMISSION_DENIED,
    ErrorKind.STORE_RESET,
    ErrorKind.DAMAGED,
}


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
    assert str(again) == str(error)
    assert again.what == f"{kind.value}: what happened"
    assert kind.final == (kind in FINAL)


def test_an_entry_is_its_seqno_and_its_bytes() -> None:
    assert VersionedData(1, b"a", revision=7) == VersionedData(1, b"a")
    assert VersionedData(1, b"a") != VersionedData(1, b"b")
    assert (
        repr(VersionedData(1, bytes(100), revision=3)) == "VersionedData(1, 100 bytes, revision=3)"
    )
