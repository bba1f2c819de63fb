"""64 clients with retries and keys, while the process is killed: none lost, none twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.process_tree import choose_seed
from connectors.http_ingest.clients import check, run_through_kills
from connectors.http_ingest.ingest_world import Deployment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_every_confirmed_document_is_there_once(tmp_path: Path) -> None:
    deployment, seed = Deployment(tmp_path), choose_seed()
    sent = run_through_kills(deployment, clients=64, kills=3, seed=seed, seconds=1.0)
    assert sent.retried, f"nobody noticed the kills, with seed {seed}"
    check(deployment, sent)
