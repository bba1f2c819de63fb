"""Requests that wait: when they are taken, what a repeat finds, who is answered."""

from __future__ import annotations

import pytest

from penstock.connectors.http_ingest.intake import (
    GROUP_S,
    QUIET_S,
    Conflict,
    Intake,
    Published,
    Ticket,
)
from penstock.connectors.http_ingest.keys import KeyedRequest, KeyLog
from penstock.runtime.connector.capture import GIVEN_BYTES_MAX


def intake() -> Intake:
    return Intake({0: KeyLog({}), 1: KeyLog({})})


def ticket(key: str | None = None, *, binding: int = 0, size: int = 10, body: str = "") -> Ticket:
    keyed = None if key is None else KeyedRequest.of(key, body.encode())
    return Ticket(
        binding=binding, texts=[b"{}"] * 2, bytes=size, received_s=0.0, keyed=keyed, key=key
    )


def waiting(desk: Intake, made: Ticket, now_s: float = 0.0) -> Ticket:
    assert desk.admit(made) is made
    desk.wait(made, now_s)
    return made


def test_an_idle_capture_takes_a_request_at_once() -> None:
    desk = intake()
    assert desk.delay_s(0.0) is None
    waiting(desk, ticket())
    assert desk.delay_s(0.0) == 0.0


@pytest.mark.parametrize(
    ("came", "now", "wanted"),
    [
        pytest.param([0.0], 0.0, QUIET_S, id="one waits for others"),
        pytest.param([0.0], QUIET_S, 0.0, id="and no longer than that"),
        pytest.param([0.0, 0.004], 0.004, QUIET_S, id="another one came: others may, too"),
        pytest.param(
            [0.0, GROUP_S - 0.001], GROUP_S - 0.001, 0.001, id="the first has waited long enough"
        ),
    ],
)
def test_while_a_sequence_is_on_its_way_others_are_waited_for(
    came: list[float], now: float, wanted: float
) -> None:
    desk = intake()
    waiting(desk, ticket())
    desk.take(1000)
    for at in came:
        waiting(desk, ticket(), at)
    assert desk.delay_s(now) == pytest.approx(wanted)


def test_enough_for_a_sequence_does_not_wait() -> None:
    desk = intake()
    waiting(desk, ticket())
    desk.take(1000)
    waiting(desk, ticket(size=GIVEN_BYTES_MAX))
    assert desk.delay_s(0.0) == 0.0


def test_a_sequence_has_requests_up_to_its_size_and_one_at_least() -> None:
    desk = intake()
    large = waiting(desk, ticket(size=GIVEN_BYTES_MAX * 2))
    small = [waiting(desk, ticket(size=GIVEN_BYTES_MAX // 2)) for _ in range(3)]
    assert desk.take(1000).tickets == (large,)
    assert desk.take(1000).tickets == tuple(small[:2])
    assert desk.take(1000).tickets == (small[2],)


def test_a_repeat_waits_with_the_first_and_finds_its_outcome_afterwards() -> None:
    desk = intake()
    first = waiting(desk, ticket("k"))
    assert desk.admit(ticket("k")) is first
    assert desk.admitted == 1
    desk.take(1000)
    assert desk.admit(ticket("k")) is first, "on its way"
    assert desk.commit(1, 0.0) == [first]
    assert desk.admit(ticket("k")) == Published(2, repeated=True)
    assert desk.admitted == 0


def test_a_key_belongs_to_one_body_and_one_binding() -> None:
    desk = intake()
    waiting(desk, ticket("k", body="a"))
    assert isinstance(desk.admit(ticket("k", body="b")), Conflict)
    desk.take(1000)
    desk.commit(1, 0.0)
    assert isinstance(desk.admit(ticket("k", body="b")), Conflict)
    waiting(desk, ticket("k", body="b", binding=1))


def test_a_refused_request_leaves_no_key_behind() -> None:
    desk = intake()
    first = ticket("k")
    desk.admit(first)
    desk.leave(first)
    again = ticket("k")
    assert desk.admit(again) is again


def test_sequences_are_settled_in_the_order_in_which_they_were_given() -> None:
    desk = intake()
    first, second = waiting(desk, ticket()), ticket()
    desk.take(1000)
    waiting(desk, second)
    desk.take(1000)
    assert desk.commit(1, 0.0) == [first]
    assert desk.commit(1, 0.0) == [second]


def test_a_stop_turns_away_whoever_is_not_committed() -> None:
    desk = intake()
    given, left = waiting(desk, ticket("a")), ticket("b")
    desk.take(1000)
    waiting(desk, left)
    assert desk.stop() == [given, left]
    assert desk.stopping
    assert (desk.admitted, desk.admitted_bytes) == (0, 0)


def test_only_bindings_with_keys_change_the_state() -> None:
    desk = intake()
    waiting(desk, ticket())
    waiting(desk, ticket("k", binding=1))
    assert list(desk.take(1000).changes) == [1]
