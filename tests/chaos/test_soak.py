"""Many small transactions in one process: the resources it uses stay flat.

The default run is short, and shows that figures are taken and nothing runs away;
`PENSTOCK_CHAOS_SECONDS` sets its length, and prints the table of `docs/RELIABILITY.md`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chaos.test_runtime_chaos import Endpoint, postgres_endpoint, sqlite_endpoint
from runtime.sessions import accounts, reduced

SECONDS = float(os.environ.get("PENSTOCK_CHAOS_SECONDS", "0"))
LONG = SECONDS > 0
SHORT_S = 20.0

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600 + 2 * SECONDS)]

WARM = 0.4
"""The share of a run after which caches are full, pools have grown and code is compiled."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How much a figure may grow from the warm part of a run to its end."""

    key: str
    title: str
    per_transaction: float = 0.0
    besides: float = 0.0
    """Added once, regardless of the number of transactions."""


TOLERANCES = (
    Tolerance("python_kb", "Python, KB resident", per_transaction=2, besides=4_000),
    Tolerance("jvm_kb", "JVM, KB resident", besides=300_000),  # its heap grows to its limit
    Tolerance("descriptors", "descriptors", besides=4),
    Tolerance("threads", "threads", besides=4),
    Tolerance("temporary_files", "temporary files", besides=10),
    Tolerance("staged_files", "staged files", besides=4),
    Tolerance("disk_bytes", "stores, bytes", per_transaction=12_000, besides=8 << 20),
)


def run(
    directory: Path, endpoint: Endpoint, seconds: float, *options: str
) -> tuple[list[dict[str, Any]], int]:
    """Return the samples of a run, and the number of documents it appended."""
    temporary = directory / "tmp"
    temporary.mkdir()
    command = [
        sys.executable, "-m", "chaos.soak_process", "--data", str(directory / "data"),
        "--endpoint", json.dumps({"image": endpoint.image, "config": endpoint.config}),
        "--seconds", str(seconds), "--every", str(max(seconds / 30, 2)),
        *options,
    ]  # fmt: skip
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=seconds + 300
    )
    assert done.returncode == 0, done.stderr[-5000:]
    *samples, last = map(json.loads, done.stdout.splitlines())
    return samples, last["appended"]


long_only = pytest.mark.skipif(not LONG, reason="only in long runs: make chaos")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("sqlite", (), id="sqlite"),
        pytest.param("sqlite", ("--one-writer",), id="sqlite, one writer", marks=long_only),
        pytest.param("sqlite", ("--api",), id="sqlite, by the API", marks=long_only),
        pytest.param("postgres", (), id="postgres", marks=[pytest.mark.postgres, long_only]),
    ],
)
def test_a_process_does_not_grow_with_its_transactions(
    tmp_path: Path, kind: str, options: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    endpoint = (
        sqlite_endpoint(tmp_path)
        if kind == "sqlite"
        else postgres_endpoint(request.getfixturevalue("postgres_url"))
    )
    samples, appended = run(tmp_path, endpoint, SECONDS or SHORT_S, *options)
    assert endpoint.rows() == reduced(accounts(0, appended, keys=50))

    end = samples[-1]
    warm = next(s for s in samples if s["transactions"] >= WARM * end["transactions"])
    between = end["transactions"] - warm["transactions"]
    lines = [
        f"{' '.join((kind, *options))}: {end['transactions']} transactions in "
        f"{end['seconds']:.0f} s",
        f"{'':24} {'first':>12} {'warm':>12} {'end':>12} {'each':>10} {'allowed':>10}",
    ]
    grown = []
    for limit in TOLERANCES:
        more = end[limit.key] - warm[limit.key]
        allowed = limit.per_transaction * between + limit.besides
        lines.append(
            f"{limit.title:24} {samples[0][limit.key]:12,} {warm[limit.key]:12,} "
            f"{end[limit.key]:12,} "
            f"{more / max(between, 1):10,.2f} {allowed / max(between, 1):10,.2f}"
        )
        if more > allowed:
            grown.append(f"{limit.title}: {more:,} more, {allowed:,.0f} allowed")
    table = "\n".join(lines)
    print(table)  # noqa: T201
    assert between > 0, table
    assert not grown, f"{grown}\n{table}"
