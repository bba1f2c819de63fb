"""Clients that send until they are answered, while whoever answers is killed."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx

from connectors.http_ingest.ingest_world import Deployment


@dataclass
class Clients:
    """Threads that send documents, each request with a key of its own."""

    deployment: Deployment
    count: int
    confirmed: list[int] = field(default_factory=list)
    """Documents of requests that were answered with 200."""
    statuses: Counter[int] = field(default_factory=Counter)
    retried: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ending: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(self.count)]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Begin no request any more, and wait until all are answered."""
        self._ending.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive(), "a client got no answer"

    def _run(self, client: int) -> None:
        number = 0
        with httpx.Client(timeout=20) as http:
            while not self._ending.is_set():
                some = [client * 10_000_000 + number + n for n in range(1 + number % 3)]
                number += len(some)
                self._send(http, some)
                with self._lock:
                    self.confirmed += some

    def _send(self, http: httpx.Client, some: list[int]) -> None:
        while True:
            try:
                answer = http.post(
                    self.deployment.url,
                    json=[{"id": each} for each in some],
                    headers={"idempotency-key": f"k{some[0]}"},
                )
            except httpx.TransportError:
                self.retried += 1
                time.sleep(random.uniform(0.01, 0.2))
                continue
            with self._lock:
                self.statuses[answer.status_code] += 1
            if answer.status_code == 200:
                assert answer.json() == {"published": len(some)}
                return
            assert answer.status_code in (429, 503), answer.text
            time.sleep(random.uniform(0.01, 0.2))


def run_through_kills(
    deployment: Deployment, *, clients: int, kills: int, seed: int, seconds: float
) -> Clients:
    """Kill the leader, again and again, while clients send; then stop it."""
    chance = random.Random(seed)
    deployment.apply()
    deployment.start()
    deployment.wait_until_it_serves()
    sending = Clients(deployment, clients)
    sending.start()
    try:
        for _ in range(kills):
            before = len(sending.confirmed)
            time.sleep(chance.uniform(0.3, 1.0) * seconds)
            until = time.monotonic() + 60
            while len(sending.confirmed) == before and time.monotonic() < until:
                time.sleep(0.01)
            deployment.kill()
            deployment.start()
            deployment.wait_until_it_serves()
        time.sleep(seconds)
    finally:
        sending.finish()
        code = deployment.stop()
    assert code == 0, deployment.log()
    return sending


def check(deployment: Deployment, sending: Clients) -> None:
    """Every confirmed document is there once, and nothing else is."""
    found = Counter(document["id"] for document in deployment.documents())
    twice = [number for number, times in found.items() if times > 1]
    assert not twice, f"published twice: {twice[:10]}"
    lost = set(sending.confirmed) - found.keys()
    assert not lost, f"confirmed and lost: {sorted(lost)[:10]}"
    assert found.keys() == set(sending.confirmed), "every request was answered in the end"
