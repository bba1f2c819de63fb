from __future__ import annotations

import pickle

from penstock.errors import UserError


def test_an_error_prints_what_where_why_and_fix() -> None:
    error = UserError("cannot read x", where="x:1", why="no such file", fix="make one")
    assert str(error) == "cannot read x\n  where x:1\n  why   no such file\n  fix   make one"


def test_an_error_survives_the_way_back_from_a_worker() -> None:
    error = pickle.loads(pickle.dumps(UserError("a", where="b", fix="c")))  # noqa: S301
    assert isinstance(error, UserError)
    assert (error.what, error.where, error.why, error.fix) == ("a", "b", None, "c")
