from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.consensus.backend import (
    Unit,
    judge,
    page_end,
    prefix_range,
    settle,
    unsettled,
)
from penstock.consensus.sqlite import refuse_network_filesystem
from penstock.consensus.store import CasResult, ErrorKind, Indeterminate, VersionedData
from penstock.errors import UserError

KEYS = ["a", "b", "c"]
heads_of = st.dictionaries(st.sampled_from(KEYS), st.integers(0, 2))
units_of = st.lists(
    st.dictionaries(st.sampled_from(KEYS), st.integers(0, 3), min_size=1).map(
        lambda keys: tuple((key, VersionedData(seqno, b"")) for key, seqno in keys.items())
    ),
    max_size=6,
)


def one_by_one(heads: dict[str, int], units: list[Unit]) -> tuple[list[bool], dict[str, int]]:
    """What the contract says, step by step."""
    heads, wins = dict(heads), []
    for unit in units:
        won = all(heads.get(key, -1) == new.seqno - 1 for key, new in unit)
        wins.append(won)
        if won:
            heads |= {key: new.seqno for key, new in unit}
    return wins, heads


@given(heads_of, units_of)
def test_a_batch_is_the_same_as_its_units_one_after_the_other(
    heads: dict[str, int], units: list[Unit]
) -> None:
    verdict = judge(heads, units)
    wins, after = one_by_one(heads, units)
    assert list(verdict.wins) == wins
    assert heads | dict(verdict.heads) == after


@given(heads_of, units_of)
def test_a_final_mismatch_holds_whether_or_not_the_batch_committed(
    heads: dict[str, int], units: list[Unit]
) -> None:
    error = Indeterminate(ErrorKind.UNAVAILABLE, "lost")
    verdict = judge(heads, units)
    for unit, won, outcome in zip(
        units, verdict.wins, unsettled(verdict, error).outcomes, strict=True
    ):
        alone, _ = one_by_one(heads, [unit])
        if outcome is CasResult.EXPECTATION_MISMATCH:
            assert not won
            assert alone == [False]
        else:
            assert outcome is error
            assert won or alone == [True]


@given(heads_of, units_of)
def test_settled_outcomes_are_the_verdict(heads: dict[str, int], units: list[Unit]) -> None:
    verdict = judge(heads, units)
    assert [o is CasResult.COMMITTED for o in settle(verdict, 1).outcomes] == list(verdict.wins)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=12).map(sorted),
    st.integers(1, 6),
    st.integers(0, 12),
)
def test_a_page_ends_between_revisions_and_gets_on(
    rows: list[tuple[int, int]], entries_max: int, bytes_max: int
) -> None:
    end = page_end(rows, entries_max=entries_max, bytes_max=bytes_max)

    def fits(upto: int) -> bool:
        page = [size for revision, size in rows if revision <= upto]
        return len(page) <= entries_max and sum(page) <= bytes_max

    revisions = sorted({revision for revision, _ in rows})
    if end is None:
        assert not rows or fits(revisions[-1])
    else:
        assert not fits(revisions[-1])
        assert end == max([r for r in revisions if fits(r)], default=revisions[0])


@given(st.text(max_size=3), st.text(max_size=5))
def test_the_range_of_a_prefix_holds_its_keys_and_no_others(prefix: str, key: str) -> None:
    low, high = (bound.encode("utf-8", "surrogatepass") for bound in prefix_range(prefix))
    inside = low <= key.encode("utf-8", "surrogatepass") <= high
    assert inside == key.startswith(prefix)


MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb1 /home/fast\\040disk ext4 rw 0 0
//nas/x /mnt/nas cifs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        pytest.param("/var/lib/p.db", None, id="a local disk"),
        pytest.param("/home/me/p.db", "nfs4", id="nfs"),
        pytest.param("/home/fast disk/p.db", None, id="a local disk mounted inside nfs"),
        pytest.param("/homework/p.db", None, id="a name that only begins like the mount"),
        pytest.param("/mnt/nas/a/b/p.db", "cifs", id="smb"),
    ],
)
def test_a_network_filesystem_is_refused(path: str, kind: str | None) -> None:
    if kind is None:
        refuse_network_filesystem(Path(path), MOUNTS)
        refuse_network_filesystem(Path(path), "")
    else:
        with pytest.raises(UserError, match=kind):
            refuse_network_filesystem(Path(path), MOUNTS)
