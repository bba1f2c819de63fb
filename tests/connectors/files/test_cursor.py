"""Which files are read, in which order, and that each is read once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.connectors.files.cursor import Changed, Cursor, Found, settled, take
from penstock.runtime.patches import apply_patches

FOUND = st.builds(
    Found,
    version=st.integers(0, 5),
    path=st.sampled_from([f"{at}.jsonl" for at in range(8)]),
    size=st.integers(0, 100),
)
LISTINGS = st.lists(FOUND, unique_by=lambda each: each.path, max_size=8)


@given(LISTINGS, st.integers(1, 3))
def test_every_file_is_read_once_in_order(listed: list[Found], at_once: int) -> None:
    cursor = Cursor()
    read: list[Found] = []
    while fresh := cursor.fresh(listed):
        some = take(fresh, bytes_max=10**9, files_max=at_once)
        cursor, _ = cursor.read(some)
        read += some
    assert read == sorted(listed)
    assert cursor.changed(listed) == []


@given(st.lists(LISTINGS, max_size=4), st.booleans())
def test_patches_lead_to_the_cursor(listings: list[list[Found]], monotonic: bool) -> None:
    cursor = Cursor(monotonic=monotonic)
    state: object = {}
    for listed in listings:
        some = cursor.fresh(listed)
        if some:
            cursor, patch = cursor.read(some)
            state = apply_patches(state, ({"b": patch},))  # type: ignore[arg-type]
    assert isinstance(state, dict)
    assert Cursor.decode(state.get("b"), monotonic=monotonic).files == cursor.files


@given(LISTINGS)
def test_a_monotonic_cursor_reads_all_at_first_and_remembers_little(listed: list[Found]) -> None:
    cursor = Cursor(monotonic=True)
    some = cursor.fresh(listed)
    assert some == sorted(listed)
    if some:
        after, _ = cursor.read(some)
        assert set(after.files) == {each.path for each in some if each.version == some[-1].version}
        assert after.fresh(listed) == []
        newer = Found(version=some[-1].version + 1, path="new", size=1)
        assert after.fresh([*listed, newer]) == [newer]


def test_a_changed_file_is_named_and_not_read_again() -> None:
    cursor, _ = Cursor().read([Found(version=1, path="a", size=10)])
    now = [Found(version=2, path="a", size=12)]
    assert cursor.fresh(now) == []
    assert cursor.changed(now) == [Changed(path="a", size_then=10, size_now=12)]


def test_files_that_may_still_be_written_hold_back_later_ones() -> None:
    second = 10**9
    files = [Found(version=at * second, path=str(at), size=1) for at in (1, 5, 9)]
    assert settled(files, now_ns=7 * second, settle_s=2) == files[:2]
    assert settled(files, now_ns=7 * second, settle_s=5) == files[:1]


def test_one_file_is_taken_even_if_it_is_large() -> None:
    files = [Found(version=1, path=p, size=s) for p, s in (("a", 50), ("b", 30), ("c", 40))]
    assert take(files, bytes_max=20, files_max=9) == files[:1]
    assert take(files, bytes_max=80, files_max=9) == files[:2]
    assert take(files, bytes_max=10**6, files_max=1) == files[:1]
