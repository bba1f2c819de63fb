"""64 clients send documents over HTTP while the capture is killed at random.

Each request has an idempotency key and is repeated until it is answered. In the end every document
of an answered request is in the collection once. The default run is short; with
`PENSTOCK_CHAOS_SECONDS` it has 40 kills.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chaos.process_tree import choose_seed
from connectors.http_ingest.clients import check, run_through_kills
from connectors.http_ingest.ingest_world import Deployment

LONG = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", "0")) > 0
KILLS, SECONDS = (40, 4.0) if LONG else (2, 1.0)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600 + 3600 * LONG)]


def test_kills_at_any_time_lose_and_double_nothing_that_clients_send(tmp_path: Path) -> None:
    deployment, seed = Deployment(tmp_path), choose_seed()
    sent = run_through_kills(deployment, clients=64, kills=KILLS, seed=seed, seconds=SECONDS)
    check(deployment, sent)
