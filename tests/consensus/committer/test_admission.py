"""Refusals come before any work, say when to come back, and hold no place."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import pytest

from penstock.consensus.committer.admission import Admission
from penstock.consensus.committer.options import Limits
from penstock.consensus.store import Determinate, ErrorKind

SMALL = Limits(inflight_max=8, queue_per_key_max=2, queue_bytes_max=100, subscribers_max=1)


def refused(reason: str, admission: Admission) -> bool:
    return admission.rejected[reason] == 1


@pytest.mark.parametrize(
    ("reason", "before", "last"),
    [
        pytest.param("inflight", [(f"c{n}", 0, None) for n in range(8)], ("x", 0, None), id="all"),
        pytest.param("client", [("c", 0, None)] * 2, ("c", 0, None), id="a quarter per client"),
        pytest.param("key", [(None, 0, "k")] * 2, (None, 0, "k"), id="one key"),
        pytest.param("bytes", [(None, 90, None)], (None, 11, None), id="bytes"),
    ],
)
def test_what_passes_a_limit_is_refused_until_there_is_room(
    reason: str, before: list[tuple[str | None, int, str | None]], last: tuple[str, int, str]
) -> None:
    admission = Admission(SMALL)
    for operation in before:
        admission.enter(*operation)
    with pytest.raises(Determinate) as caught:
        admission.enter(*last)
    assert caught.value.kind is ErrorKind.OVERLOADED
    assert caught.value.retry_after_ms is not None
    assert 5 <= caught.value.retry_after_ms <= 5_000
    assert refused(reason, admission)
    admission.leave(*before[0])
    admission.enter(*last)


def test_the_hosting_process_is_bounded_by_the_whole_and_not_by_a_share() -> None:
    admission = Admission(SMALL)
    for _ in range(8):
        admission.enter(None)
    with pytest.raises(Determinate):
        admission.enter(None)


def test_an_operation_larger_than_the_limit_is_admitted_alone() -> None:
    admission = Admission(SMALL)
    admission.enter(None, 1_000)
    with pytest.raises(Determinate):
        admission.enter(None, 1)
    admission.leave(None, 1_000)
    admission.enter(None, 1)


def test_advice_grows_with_the_queue_and_the_latency() -> None:
    admission = Admission(Limits())
    idle = admission.retry_after_ms
    for _ in range(500):
        admission.enter(None)
        admission.observe(0.5)
    assert admission.retry_after_ms > idle


def test_subscriptions_are_counted_separately() -> None:
    admission = Admission(SMALL)
    with admission.stream():
        with pytest.raises(Determinate), admission.stream():
            pass
        admission.enter(None)
    with admission.stream():
        pass


def test_a_batch_that_arrives_holds_room_and_a_refusal_names_the_limit() -> None:
    admission = Admission(SMALL)
    with admission.arriving(60):
        for refuse in (lambda: admission.enter(None, 50), lambda: admission.check_queue(0, 60, 50)):
            with pytest.raises(Determinate, match="limit of 100") as caught:
                refuse()
            assert caught.value.kind is ErrorKind.OVERLOADED
        with pytest.raises(Determinate, match="limit of 100"), admission.arriving(50):
            pass
        admission.enter(None, 40)
    admission.enter(None, 50)


@pytest.mark.parametrize("place", [Admission.session, Admission.call])
def test_places_are_given_back(
    place: Callable[[Admission], contextlib.AbstractContextManager[None]],
) -> None:
    admission = Admission(Limits(sessions_max=1, calls_max=1))
    for _ in range(2):
        with place(admission), pytest.raises(Determinate, match="1 is the limit"), place(admission):
            pass
    assert (admission.sessions, admission.calls) == (0, 0)


def test_a_limit_below_what_clients_send_is_refused() -> None:
    with pytest.raises(ValueError, match="1048576"):
        Limits(message_bytes_max=1 << 19)


async def test_closing_refuses_everything_and_waits_for_what_is_under_way() -> None:
    admission = Admission(SMALL)
    admission.enter("c", 5, "k")
    admission.close()
    with pytest.raises(Determinate) as caught:
        admission.enter("c")
    assert caught.value.kind is ErrorKind.UNAVAILABLE
    waiting = asyncio.ensure_future(admission.emptied())
    await asyncio.sleep(0)
    assert not waiting.done()
    admission.leave("c", 5, "k")
    await waiting
    assert (admission.inflight, admission.bytes_total) == (0, 0)
