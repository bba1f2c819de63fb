"""What is cached may be old; it is never older than what was said before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.consensus.committer.cache import CACHED_ENTRY_BYTES_MAX, ShardCache
from penstock.consensus.store import VersionedData as V


def cache(shards_max: int = 100, bytes_max: int = 1 << 30) -> ShardCache:
    return ShardCache(shards_max=shards_max, bytes_max=bytes_max)


def put(heads: ShardCache, key: str, seqno: int, data: bytes = b"") -> None:
    heads.put(key, V(seqno, data), heads.ticket(key))


@given(st.permutations(range(8)))
def test_whatever_the_order_of_inserts_the_newest_head_stays(order: list[int]) -> None:
    heads = cache()
    best = -1
    for seqno in order:
        put(heads, "k", seqno)
        best = max(best, seqno)
        assert heads.get("k") == V(best, b"")


def test_a_key_that_is_read_survives_any_number_of_inserts() -> None:
    """Recency is refreshed by reads, not by inserts only."""
    heads = cache(shards_max=10)
    put(heads, "hot", 0)
    for n in range(10_000):
        put(heads, f"cold/{n}", 0)
        assert heads.get("hot") is not None
    assert len(heads) == 10
    assert heads.get("cold/0") is None


def test_occupancy_follows_inserts_and_holds_at_the_cap() -> None:
    heads = cache(shards_max=3)
    seen = []
    for n in range(5):
        put(heads, f"k/{n}", 0)
        seen.append(len(heads))
    assert seen == [1, 2, 3, 3, 3]


def test_bytes_are_bounded_and_come_back_to_nothing() -> None:
    heads = cache(bytes_max=10_000)
    for n in range(100):
        put(heads, f"k/{n}", 0, bytes(1_000))
        assert heads.bytes_total <= 10_000
    heads.clear()
    assert (heads.bytes_total, len(heads)) == (0, 0)


def test_a_larger_replacement_pushes_others_out_and_is_counted() -> None:
    heads = cache(bytes_max=3_000)
    put(heads, "a", 0, bytes(500))
    put(heads, "b", 0, bytes(500))
    put(heads, "b", 1, bytes(2_000))
    assert heads.get("a") is None
    assert heads.get("b") is not None
    assert heads.bytes_total <= 3_000


def test_large_heads_are_not_kept_and_leave_nothing_older_behind() -> None:
    heads = cache()
    put(heads, "k", 0)
    put(heads, "k", 1, bytes(CACHED_ENTRY_BYTES_MAX + 1))
    assert heads.get("k") is None
    assert heads.bytes_total == 0


def test_an_insert_that_was_under_way_during_an_eviction_is_dropped() -> None:
    """It may be older than a head that was cached, served and evicted meanwhile."""
    heads = cache(shards_max=1)
    slow = heads.ticket("k")
    put(heads, "k", 5)
    put(heads, "other", 0)
    assert heads.get("k") is None
    heads.put("k", V(4, b""), slow)
    assert heads.get("k") is None
    assert heads.late_inserts_dropped == 1


def test_a_suspect_head_is_not_served_until_a_later_read_confirms_it() -> None:
    heads = cache()
    put(heads, "k", 5)
    earlier = heads.ticket("k")
    assert heads.suspect("k", 6)
    assert heads.get("k") is None
    assert heads.known("k") == 5
    heads.put("k", V(5, b""), earlier)  # began before the contradiction: proves nothing
    assert heads.get("k") is None
    put(heads, "k", 5)
    assert heads.get("k") == V(5, b"")


def test_a_loss_that_the_cached_head_explains_is_no_reason_for_suspicion() -> None:
    heads = cache()
    put(heads, "k", 5)
    assert not heads.suspect("k", 5)
    assert heads.get("k") == V(5, b"")


def test_suspicion_of_an_absent_key_stops_reads_that_are_under_way() -> None:
    heads = cache()
    earlier = heads.ticket("k")
    assert not heads.suspect("k", 3)
    heads.put("k", V(2, b""), earlier)
    assert heads.get("k") is None


def test_clearing_also_drops_inserts_on_their_way() -> None:
    heads = cache()
    ticket = heads.ticket("k")
    heads.clear()
    heads.put("k", V(9, b""), ticket)
    assert heads.get("k") is None


class NeverBackwards(RuleBasedStateMachine):
    """One key, whose store only grows; reads return what was true between their two ends."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = cache(shards_max=2)
        self.head = 0
        self.reads: list[tuple[int, int]] = []
        self.served = -1

    @rule()
    def commit_elsewhere(self) -> None:
        self.head += 1

    @rule()
    def commit_here(self) -> None:
        ticket = self.heads.ticket("k")
        self.head += 1
        self.heads.put("k", V(self.head, b""), ticket)

    @rule()
    def begin_read(self) -> None:
        self.reads.append((self.heads.ticket("k"), self.head))

    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        if self.reads:
            index = data.draw(st.integers(0, len(self.reads) - 1))
            ticket, seen = self.reads.pop(index)
            self.heads.put("k", V(seen, b""), ticket)

    @rule(other=st.sampled_from("abc"))
    def crowd(self, other: str) -> None:
        put(self.heads, other, 0)

    @rule()
    def lose(self) -> None:
        self.heads.suspect("k", self.head)

    @invariant()
    def what_is_served_never_goes_backwards(self) -> None:
        if (found := self.heads.get("k")) is not None:
            assert found.seqno >= self.served
            assert found.seqno <= self.head
            self.served = found.seqno


TestNeverBackwards = NeverBackwards.TestCase
