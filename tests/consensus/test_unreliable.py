from __future__ import annotations

from collections import Counter

import pytest

from consensus.conformance import COMMITTED, V
from consensus.direct import DirectConsensus
from penstock.consensus.memory import MemoryBackend
from penstock.consensus.store import ConsensusError, Determinate, ErrorKind, Indeterminate
from support.unreliable import UnreliableConsensus


def unreliable(**chances: float) -> UnreliableConsensus:
    return UnreliableConsensus(DirectConsensus(MemoryBackend()), seed=1, **chances)  # type: ignore[arg-type]


async def outcome_and_truth(store: UnreliableConsensus, key: str) -> tuple[str, bool]:
    try:
        outcome = (await store.compare_and_set(key, V(0, b""))).name
    except ConsensusError as error:
        outcome = type(error).__name__
    return outcome, await store.inner.head(key) is not None


async def test_all_four_outcomes_happen_and_none_lies() -> None:
    store = unreliable(p_happen=0.5, p_timeout=0.5)
    seen = Counter([await outcome_and_truth(store, f"k{n}") for n in range(200)])
    assert set(seen) == {
        ("COMMITTED", True),
        ("Indeterminate", True),
        ("Indeterminate", False),
        ("Determinate", False),
    }
    assert min(seen.values()) > 20


async def test_what_was_given_up_may_happen_later() -> None:
    store = unreliable(p_happen=1, p_timeout=1, p_late=1)
    with pytest.raises(Indeterminate) as caught:
        await store.compare_and_set("k", V(0, b"late"))
    assert caught.value.kind is ErrorKind.TIMEOUT
    assert await store.inner.head("k") is None
    await store.settle()
    assert await store.inner.head("k") == V(0, b"late")


async def test_the_same_seed_fails_the_same_way() -> None:
    one, two = unreliable(p_happen=0.6, p_timeout=0.4), unreliable(p_happen=0.6, p_timeout=0.4)
    for n in range(50):
        assert await outcome_and_truth(one, f"k{n}") == await outcome_and_truth(two, f"k{n}")


async def test_a_healed_store_does_not_fail() -> None:
    store = unreliable(p_happen=0, p_timeout=0)
    with pytest.raises(Determinate):
        await store.head("k")
    with pytest.raises(Determinate):
        _ = [key async for key in store.list_keys()]
    store.heal()
    for n in range(20):
        assert await store.compare_and_set("k", V(n, b"")) is COMMITTED
    assert [key async for key in store.list_keys()] == ["k"]
    await store.close()
