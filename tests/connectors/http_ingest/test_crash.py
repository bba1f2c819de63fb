"""A crash after every step of a transaction: no document is lost that was confirmed, none doubled.

A client sends a request with a key, the leader dies at the point, and is run again. The client
repeats its request until it is answered, as clients do.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from connectors.http_ingest.ingest_world import Deployment, in_fork
from penstock.failpoints import FAILPOINTS
from penstock.runtime import kinds as _kinds  # noqa: F401 - declares the crash points
from runtime.crash_world import CRASHED

pytestmark = pytest.mark.timeout(300)

POINTS = sorted(
    name
    for name in FAILPOINTS
    if name.startswith("capture.")
    or name
    in {
        "leader.after-commit-record",
        "leader.after-epoch",
        "leader.after-intents",
        "leader.after-stats",
        "publisher.acks",
        "publisher.done",
        "publisher.flushed",
        "publisher.intents",
        "publisher.object",
        "publisher.rows",
        "statelog.after-send",
    }
)


def run(deployment: Deployment, failpoint: str | None) -> int:
    return in_fork(lambda: deployment.lead(failpoint))


def send(deployment: Deployment, number: int, documents: int = 2) -> int | None:
    """The status of a request; None if there was no answer."""
    try:
        answer = httpx.post(
            deployment.url,
            json=[{"id": number + each} for each in range(documents)],
            headers={"idempotency-key": f"key-{number}"},
            timeout=20,
        )
    except httpx.TransportError:
        return None
    assert answer.status_code in (200, 503), answer.text
    return answer.status_code


def ended(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG)[0] != 0


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_loses_nothing_and_doubles_nothing(tmp_path: Path, point: str) -> None:
    deployment = Deployment(tmp_path)
    deployment.apply()
    many = 9000 if point == "publisher.object" else 2  # few are carried in a record, not an object
    pid = run(deployment, None)
    deployment.wait_until_it_serves()
    assert send(deployment, 0) == 200
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

    pid = run(deployment, f"{point}:1")
    until = time.monotonic() + 60
    while not ended(pid):
        send(deployment, 10, many)
        assert time.monotonic() < until, "it did not crash"

    pid = run(deployment, None)
    try:
        deployment.wait_until_it_serves()
        assert send(deployment, 10, many) == 200
        assert send(deployment, 10, many) == 200
        assert send(deployment, 0) == 200, "a key of two sessions ago"
    finally:
        deployment.asked.touch()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sorted(document["id"] for document in deployment.documents()) == [
        0,
        1,
        *range(10, 10 + many),
    ]


def test_the_crash_is_a_crash(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    deployment.apply()
    pid = run(deployment, "leader.after-epoch:1")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == CRASHED


def test_a_stop_answers_everybody(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path)
    deployment.apply()
    pid = run(deployment, None)
    deployment.wait_until_it_serves()
    answers: list[int | None] = []

    def client(number: int) -> None:
        at = number * 1000
        while not answers or answers[-1] == 200:
            answers.append(send(deployment, at, 1))
            at += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    while len(answers) < 20:
        time.sleep(0.01)
    deployment.asked.touch()
    for thread in threads:
        thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert set(answers) <= {200, 503, None}, "served, turned away, or nobody listens any more"
    assert len(deployment.documents()) == answers.count(200)
